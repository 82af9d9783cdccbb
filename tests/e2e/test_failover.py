"""Three nodes that may coordinate: the coordinator is killed, and the swarm goes on with all that it was told."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from local_swarms import alive, process_state, start_again, start_swarm, swarmnode, wait_until
from voting_swarms import FAILOVER_S, FIRST, SECOND, SERVED_S, THIRD, VOTERS, WITH_API, Voters, answers

from swarmnode.cli.client import ApiClient
from swarmnode.cli.local_swarm import ANY_PORT
from swarmnode.cluster.ring_life import ADOPT_S, UNLOAD_S
from swarmnode.errors import SwarmError
from swarmnode.wire.address import parse_address

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
MODEL = "scripted"
RESTORED_S = ADOPT_S + UNLOAD_S + SERVED_S
"""A ring is waited for, given up, and loaded anew."""
PORTS = ("127.0.77.1:7801", "127.0.77.2:7801", "127.0.77.3:7801")
"""Of addresses that no other test uses, so that they are known before anything listens."""


@pytest.fixture
def voters(tmp_path: Path, models_root: Path) -> Iterator[Voters]:
    started = Voters(tmp_path, models_root)
    yield started
    started.close()


def test_a_killed_coordinator_has_a_successor_that_takes_everything_over_and_follows_it_when_it_is_back(
    voters: Voters,
) -> None:
    swarm = voters.swarm
    shown = swarmnode("ps", "--api", voters.local.api).stdout
    assert "decided by coordinator, attic, cellar" in shown or "decided by coordinator, cellar, attic" in shown
    ring, workers = swarm.load(MODEL, num_stages=2)["ring"], swarm.worker_pids(MODEL)
    with closing(openai.OpenAI(base_url=f"{voters.apis['attic']}/v1", api_key="none", max_retries=0)) as client:
        running = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "long"}], stream=True
        )
        assert next(iter(running))
        with closing(voters.local.client()) as admin:
            token = admin.post("/api/v1/api-tokens", {"label": "mine", "scopes": ["admin"]})["token"]
            leaked = admin.post("/api/v1/api-tokens", {"label": "leaked", "scopes": ["admin"]})
            admin.delete(f"/api/v1/api-tokens/{leaked['id']}")
        killed_s = time.monotonic()
        voters.node(FIRST).kill()
        with pytest.raises(openai.APIError):  # never a clean end
            list(running)
    wait_until(lambda: voters.successor() is not None, "one of the others coordinates", FAILOVER_S)
    for survivor in (SECOND, THIRD):
        wait_until(lambda s=survivor: answers(voters.apis[s], token), "clients are served", SERVED_S)  # type: ignore[misc]
    assert time.monotonic() - killed_s < SERVED_S + 10
    name = voters.successor()
    assert name is not None
    with closing(voters.admin(name)) as admin:
        status = admin.get(f"/api/v1/models/{MODEL}/status")
        assert {stage["peer"]: stage["pid"] for stage in status["stages"]} == workers, "taken over without a load"
        assert status["ring"] == ring
        assert [token["label"] for token in admin.get("/api/v1/api-tokens")["tokens"]] == ["mine"]
    for headers in ({}, {"authorization": f"Bearer {leaked['token']}"}):
        refused = httpx.get(f"{voters.apis[name]}/v1/models", headers=headers, trust_env=False)
        assert refused.status_code == 401, "the API stays closed"

    voters.start_again(FIRST)
    wait_until(lambda: answers(voters.local.api, token), "its port forwards", SERVED_S)
    assert "coordinating" not in [event["event"] for event in voters.node(FIRST).seen]
    assert voters.node(FIRST).wait_for("following")["name"] == name
    on_first = {"SWARM_DATA_DIR": str(voters.local.folder / "coordinator"), "SWARM_API": voters.local.api}
    asked = swarmnode("ps", **on_first)
    assert "this call needs an API token" in asked.stderr, "its own secret is no token of the other one's"
    assert MODEL in swarmnode("ps", "--token", token, **on_first).stdout
    with closing(voters.admin(name)) as admin:
        assert len(admin.get("/api/v1/nodes")["voters"]) == 3
        with pytest.raises(SwarmError, match="stop it first"):
            admin.delete(f"/api/v1/nodes/{name}")
        wait_until(
            lambda: all(link["up"] for link in admin.get("/api/v1/nodes")["voter_links"]), "all voters are linked"
        )
        admin.post(f"/api/v1/models/{MODEL}/unload", {})
    wait_until(lambda: not any(map(alive, workers.values())), "the workers have ended")

    voters.node(FIRST).kill()
    with closing(voters.admin(name)) as admin:
        admin.delete(f"/api/v1/nodes/{FIRST}")
        wait_until(lambda: len(admin.get("/api/v1/nodes")["voters"]) == 2, "it votes no more")
    voters.start_again(FIRST)
    assert "removed from the swarm" in str(voters.node(FIRST).wait_for("removed")["reason"])
    asked = swarmnode("ps", **on_first)
    assert "this node was removed from the swarm; to have this machine in the swarm again, run" in asked.stderr


@pytest.mark.soak
def test_a_coordinator_and_a_stage_that_die_together(tmp_path: Path, models_root: Path) -> None:
    """As when one power strip holds both: the ring cannot be taken over, so its successor loads it elsewhere."""
    voters = Voters(tmp_path, models_root, others=("den", "loft"))
    try:
        voters.swarm.load(MODEL, peers=["den", SECOND])  # the files of stage 1 are then on a third disk
        voters.swarm.unload(MODEL)
        voters.swarm.load("scripted-two", peers=[SECOND, THIRD])  # so that the other peers get it without being named
        before, workers = voters.swarm.load(MODEL, num_stages=2), voters.swarm.worker_pids(MODEL)
        voters.swarm.unload("scripted-two")
        stayed, gone = (stage["peer"] for stage in before["stages"])
        assert not {stayed, gone} & {*VOTERS}
        voters.node(gone).kill()
        voters.node(FIRST).kill()
        wait_until(lambda: voters.successor() is not None, "one of the others coordinates", FAILOVER_S)
        wait_until(lambda: answers(voters.apis[stayed], "none"), "the ring is loaded again", RESTORED_S)
        name = voters.successor()
        assert name is not None
        with closing(voters.admin(name)) as admin:
            first, second = (stage["peer"] for stage in admin.get(f"/api/v1/models/{MODEL}/status")["stages"])
        assert (first, second in VOTERS) == (stayed, True), "every stage stays that can"
        assert not any(map(alive, workers.values())), "of the lost ring nothing is left"
    finally:
        voters.close()


@pytest.mark.soak
def test_files_that_only_the_first_machine_has_come_from_it_once_it_is_back(tmp_path: Path, models_root: Path) -> None:
    """It imported the model and follows now; the stage that dies is the only one that fetched its part."""
    voters = Voters(tmp_path, models_root, others=("den", "loft"))
    try:
        voters.swarm.load("scripted-two", peers=[SECOND, THIRD])  # so that the other peers get it without being named
        stayed, gone = (stage["peer"] for stage in voters.swarm.load(MODEL, num_stages=2)["stages"])
        assert not {stayed, gone} & {*VOTERS}
        voters.swarm.unload("scripted-two")
        voters.node(FIRST).kill()
        wait_until(lambda: voters.successor() is not None, "one of the others coordinates", FAILOVER_S)
        voters.start_again(FIRST)
        wait_until(lambda: answers(voters.local.api, "none"), "the first one follows", SERVED_S)
        assert voters.successor() != FIRST
        voters.node(gone).kill()
        wait_until(lambda: not answers(voters.apis[stayed], "none"), "the ring is lost")
        wait_until(lambda: answers(voters.apis[stayed], "none"), "the ring is loaded again", RESTORED_S)
        name = voters.successor()
        assert name is not None
        with closing(voters.admin(name)) as admin:
            peers = [stage["peer"] for stage in admin.get(f"/api/v1/models/{MODEL}/status")["stages"]]
        assert gone not in peers
        assert {*peers} & {SECOND, THIRD}
    finally:
        voters.close()


def test_a_coordinator_that_was_stopped_for_a_while_finds_that_it_is_none(voters: Voters) -> None:
    """SIGSTOP: it hears nothing, says nothing, and knows nothing of it when it goes on."""
    old = voters.local.coordinator
    assert old is not None
    voters.swarm.load(MODEL, num_stages=2)
    with closing(voters.local.client()) as admin:
        token = admin.post("/api/v1/api-tokens", {"label": "mine", "scopes": ["admin"]})["token"]
    old.process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: process_state(old.process.pid) == "T", "it is stopped")
        wait_until(lambda: voters.successor() is not None, "one of the others coordinates", FAILOVER_S)
        name = voters.successor()
        assert name is not None
        wait_until(lambda: answers(voters.apis[name], token), "clients are served", SERVED_S)
    finally:
        old.process.send_signal(signal.SIGCONT)
    wait_until(lambda: "resigned" in {event["event"] for event in old.seen}, "the old one steps down")
    wait_until(lambda: answers(voters.local.api, token), "its port forwards", SERVED_S)
    with closing(voters.admin(name)) as admin:
        assert [token["label"] for token in admin.get("/api/v1/api-tokens")["tokens"]] == ["mine"]
        assert len(admin.get("/api/v1/nodes")["peers"]) == 2, "both obey the new one"


@pytest.mark.soak
def test_a_peer_that_reaches_only_api_ports_finds_the_new_coordinator(tmp_path: Path, models_root: Path) -> None:
    """As behind a NAT and a firewall that lets nothing but HTTP through."""
    swarm = start_swarm(tmp_path, models_root, peers=0)
    try:
        local = swarm.local
        local.start_coordinator(api_listen=PORTS[0], extra=("--advertise-api", f"http://{PORTS[0]}"))
        for name, port in zip(("attic", "cellar"), PORTS[1:], strict=True):
            local.start_peers(name, extra=("--voter", "--api-listen", port, "--advertise-api", f"http://{port}"))
        local.environment = {"SWARM_LINK_ROUTES": "polled"}
        local.start_peers("den", extra=WITH_API)
        with closing(local.client()) as admin:
            wait_until(lambda: len(admin.get("/api/v1/nodes")["voters"]) == 3, "all three vote")
            loaded = admin.post(f"/api/v1/models/{MODEL}/load", {"wait": True, "peers": ["den"], "num_stages": 1})
        api = next(event["api"] for event in local.peers["den"].seen if event["event"] == "ready")
        assert answers(api, "none")
        assert local.coordinator is not None
        local.coordinator.kill()
        wait_until(lambda: answers(api, "none"), "its own port serves again", SERVED_S)
        with closing(ApiClient(api)) as client:
            status = client.get(f"/api/v1/models/{MODEL}/status")
        assert status["stages"][0]["pid"] == loaded["stages"][0]["pid"]
    finally:
        swarm.close()


def test_who_cannot_be_reached_gets_no_vote_and_hears_why(tmp_path: Path, models_root: Path) -> None:
    swarm = start_swarm(tmp_path, models_root, peers=0, environment={"SWARM_ADMIT_VOTERS": "1"})
    try:
        local = swarm.local
        local.start_peers("attic", extra=("--voter", "--api-listen", "127.0.0.1:0", "--advertise", "127.0.0.1:9"))
        refused = local.peers["attic"].wait_for("seat_refused")
        assert "was not reached at 127.0.0.1:9" in refused["why"]
        assert not (local.folder / "attic" / "identity" / "ca-key.pem").exists()
    finally:
        swarm.close()


def test_a_swarm_that_takes_no_voters_says_so(tmp_path: Path, models_root: Path) -> None:
    swarm = start_swarm(tmp_path, models_root, peers=0, environment={"SWARM_ADMIT_VOTERS": "0"})
    try:
        swarm.local.start_peers("attic", extra=("--voter", *WITH_API))
        refused = swarm.local.peers["attic"].wait_for("seat_refused")
        assert "SWARM_ADMIT_VOTERS" in refused["why"]
        assert not (swarm.local.folder / "attic" / "identity" / "ca-key.pem").exists()
    finally:
        swarm.close()


def test_of_two_nodes_the_second_goes_on_when_a_person_says_so(tmp_path: Path, models_root: Path) -> None:
    swarm = start_swarm(tmp_path, models_root, peers=0)
    try:
        local = swarm.local
        local.start_peers("attic", "cellar", extra=WITH_API)
        local.start_peers("den", extra=("--voter", *WITH_API))
        with closing(local.client()) as admin:
            token = admin.post("/api/v1/api-tokens", {"label": "mine", "scopes": ["admin"]})["token"]
            wait_until(lambda: (local.folder / "den" / "swarm.json").exists(), "the second one has the document")
            assert admin.get("/api/v1/nodes")["voters"] == ["coordinator"], "two voters would stop at the loss of one"
            admin.post(f"/api/v1/models/{MODEL}/load", {"wait": True, "peers": ["attic", "cellar"]})
        early = swarmnode("promote", "--force", "--data-dir", local.folder / "den")
        assert (early.returncode, "stop it" in early.stderr) == (1, True)
        assert local.coordinator is not None
        local.coordinator.kill()
        local.peers["den"].stop()
        assert swarmnode("promote", "--data-dir", local.folder / "den").returncode == 2, "never by accident"
        done = swarmnode("promote", "--force", "--data-dir", local.folder / "den", "--json")
        assert done.returncode == 0, done.stderr
        api = start_again(local, "den", "--voter", *WITH_API)["api"]
        wait_until(lambda: answers(api, token), "the ring is taken over", SERVED_S)
        old_address, old_api = local.swarm, local.api.removeprefix("http://")
        local.start_coordinator(swarm_listen=old_address, api_listen=old_api)
        wait_until(lambda: answers(local.api, token), "the one that was given up follows", SERVED_S)
    finally:
        swarm.close()


def test_voters_that_come_back_at_other_ports_are_found_again(voters: Voters) -> None:
    """Each one's port is another program's by then: first that of one that follows, then the coordinator's own."""
    with ExitStack() as taken:
        for name, coordinates in ((SECOND, FIRST), (FIRST, None)):
            before = parse_address(str(voters.ready(name)["swarm"]))
            voters.node(name).kill()
            taken.enter_context(socket.create_server((before.host, before.port)))
            if coordinates is None:
                wait_until(lambda: voters.successor() is not None, "one of the others coordinates", FAILOVER_S)
                coordinates = voters.successor()
            assert coordinates is not None
            voters.start_elsewhere(name)
            assert voters.ready(name)["swarm"] != str(before)
            with closing(voters.admin(coordinates)) as admin:
                wait_until(lambda a=admin: linked(a), "every voter is linked", SERVED_S)  # type: ignore[misc]
        third = {*VOTERS} - {FIRST, coordinates}
        voters.node(coordinates).kill()
        wait_until(
            lambda: voters.successor() in {FIRST, *third}, "it counts: without it there is no majority", FAILOVER_S
        )


@pytest.mark.soak
def test_two_voters_that_move_at_once_and_the_one_that_stayed_go_on(voters: Voters) -> None:
    """It reaches neither of them until they have called it."""
    stayed = voters.node(FIRST)
    with ExitStack() as taken:
        for name in (SECOND, THIRD):
            before = parse_address(str(voters.ready(name)["swarm"]))
            voters.node(name).kill()
            taken.enter_context(socket.create_server((before.host, before.port)))
        wait_until(lambda: stayed.seen[-1]["event"] == "resigned", "without a majority it does not coordinate")
        for name in (SECOND, THIRD):
            start_again(voters.local, name, "--voter", *WITH_API, listen=ANY_PORT)
        wait_until(lambda: "coordinating" in [event["event"] for event in stayed.seen], "it is elected", FAILOVER_S)
        with closing(voters.admin(FIRST)) as admin:
            wait_until(lambda: linked(admin), "every voter is linked", SERVED_S)
            wait_until(lambda: len(admin.get("/api/v1/nodes")["peers"]) == 2, "both have joined", SERVED_S)


def linked(admin: ApiClient) -> bool:
    """All three vote, and whoever coordinates reaches both others."""
    nodes = admin.get("/api/v1/nodes")
    return len(nodes["voters"]) == 3 and [link["up"] for link in nodes["voter_links"]] == [True, True]


def test_without_a_majority_nothing_is_acknowledged(voters: Voters) -> None:
    for name in (SECOND, THIRD):
        voters.node(name).kill()
    deadline_s = time.monotonic() + 12
    outcome: Any = None
    with closing(voters.local.client()) as admin:
        while time.monotonic() < deadline_s and outcome is None:
            try:
                admin.post("/api/v1/api-tokens", {"label": "lost", "scopes": ["read"]})
            except SwarmError as error:
                outcome = error
    assert outcome is not None
    assert outcome.code in ("not_coordinator", "no_coordinator")
