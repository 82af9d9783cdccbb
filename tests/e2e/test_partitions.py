"""Real nodes whose lines are cut while their processes live: one way for good, all of a coordinator's, a relay's."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest
from local_swarms import Swarm, alive, start_swarm, wait_until
from toxics import ToxicProxy, toxic_proxy
from voting_swarms import FAILOVER_S, FIRST, SECOND, SERVED_S, THIRD, VOTERS, WITH_API, Voters, answers

from swarmnode.cluster.election import HEARTBEAT_S
from swarmnode.errors import SwarmError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from swarmnode.cli.client import ApiClient
    from swarmnode.cli.local_swarm import NodeProcess

pytestmark = pytest.mark.e2e
MODEL = "scripted"
STRAIGHT = {"SWARM_LINK_ROUTES": "direct"}
"""Else a node would find its coordinator's API port, which is not behind a proxy."""
NOWHERE = "127.0.0.1:9"
CONCLUDED_S = 20.0
RELINKED_S = 15.0
PORTS = {FIRST: ("127.0.78.1", 7801), SECOND: ("127.0.78.2", 7801), THIRD: ("127.0.78.3", 7801)}
"""Of addresses that no other test uses, so that a proxy knows them before anything listens."""
ALONE = "of the old one"
REFUSED = {"not_coordinator", "no_coordinator"}
"""What a node says to administrators that cannot decide."""


@pytest.mark.parametrize("watched_s", [1.0, pytest.param(60.0, marks=pytest.mark.soak)])
def test_scenario_4_a_line_to_the_coordinator_that_is_cut_one_way_for_good(
    tmp_path: Path, models_root: Path, watched_s: float
) -> None:
    with toxic_proxy(PORTS[FIRST]) as line:
        at = listening(FIRST, line)
        swarm = start_swarm(tmp_path, models_root, peers=0, environment=STRAIGHT, coordinator=at)
        try:
            swarm.local.start_peers("den")
            den = swarm.local.peers["den"]
            swarm.load(MODEL, peers=["den"])
            line.there.cut, cut_s = True, time.monotonic()
            wait_until(lambda: "peer_left" in told(swarm), "the coordinator concludes", CONCLUDED_S)
            wait_until(lambda: "coordinator_lost" in seen(den), "so does the peer", CONCLUDED_S)
            assert time.monotonic() - cut_s < CONCLUDED_S
            time.sleep(watched_s)
            assert line.there.effects.vanished_bytes > 0
            assert line.connections > 2, "it dialled again"
            assert line.back.effects.vanished_bytes == 0
            assert (told(swarm).count("peer_left"), told(swarm).count("peer_joined")) == (1, 1), "no flapping"
            assert seen(den).count("joined") == 1
            line.there.cut = False
            wait_until(lambda: answers(swarm.local.api, "none"), "it is back, and serves", SERVED_S)
        finally:
            swarm.close()


def listening(name: str, line: ToxicProxy) -> tuple[str, ...]:
    """A node's arguments: others reach it by that line."""
    return ("--swarm-listen", "{}:{}".format(*PORTS[name]), "--advertise", line.place)


def told(swarm: Swarm) -> list[str]:
    """The coordinator's events about its peer."""
    return [event["event"] for event in swarm.client.get("/api/v1/nodes")["events"] if event.get("name") == "den"]


def seen(node: NodeProcess) -> list[str]:
    return [event["event"] for event in node.seen]


@pytest.mark.parametrize("away_s", [0.0, pytest.param(20.0, marks=pytest.mark.soak)])
def test_scenario_6_a_relay_that_is_started_again_carries_the_links_it_carried(
    tmp_path: Path, models_root: Path, away_s: float
) -> None:
    """The coordinator is the relay; neither peer can be dialled."""
    swarm = start_swarm(tmp_path, models_root, peers=0)
    try:
        local = swarm.local
        local.start_peers("attic", "cellar", extra=("--advertise", NOWHERE))
        swarm.load(MODEL, peers=["attic", "cellar"])
        workers = swarm.worker_pids(MODEL)
        assert routes(swarm) == {"act": "relayed", "pre": "relayed", "tok": "relayed"}
        assert local.coordinator is not None
        local.coordinator.kill()
        time.sleep(away_s)
        local.start_coordinator(swarm_listen=local.swarm, api_listen=local.api.removeprefix("http://"))
        assert swarm.client.get("/api/v1/nodes")["carried"]["tunnels"] < 3, "it is another process"
        wait_until(lambda: answers(local.api, "none"), "a chat goes through the relay", RELINKED_S)
        assert routes(swarm) == {"act": "relayed", "pre": "relayed", "tok": "relayed"}
        assert swarm.client.get("/api/v1/nodes")["carried"]["tunnels"] == 3
        assert swarm.worker_pids(MODEL) == workers, "nothing was loaded again"
    finally:
        swarm.close()


def routes(swarm: Swarm) -> dict[str, str]:
    """By lane."""
    return {link["lane"]: link["route"] for stage in swarm.status(MODEL)["stages"] for link in stage["links"]}


class Parted(Voters):
    """Three voters that dial each other through a proxy before each; `part` holds up all that comes from or goes to
    the first one, in both directions, as a network does that delivers it late or never."""

    def __init__(self, folder: Path, models_root: Path, lines: dict[str, ToxicProxy]) -> None:
        self.lines = lines
        super().__init__(folder, models_root, environment=STRAIGHT, coordinator=listening(FIRST, lines[FIRST]))

    def start_followers(self) -> None:
        for name in (SECOND, THIRD):
            self.lines[name].dialers = frozenset({self.node(FIRST).process.pid})
            self.local.start_peers(name, extra=("--voter", *WITH_API, *listening(name, self.lines[name])))

    def part(self, *, apart: bool) -> None:
        for line in self.lines.values():
            line.there.stalled = line.back.stalled = apart


@pytest.fixture
def parted(tmp_path: Path, models_root: Path) -> Iterator[Parted]:
    with ExitStack() as stack:
        lines = {name: stack.enter_context(toxic_proxy(PORTS[name])) for name in VOTERS}
        voters = Parted(tmp_path, models_root, lines)
        stack.callback(voters.close)
        yield voters


def test_scenario_19_of_two_coordinators_only_the_one_with_a_majority_decides(parted: Parted) -> None:
    parted.swarm.load(MODEL, num_stages=2)
    workers = parted.swarm.worker_pids(MODEL)
    with closing(parted.local.client()) as old:
        token = old.post("/api/v1/api-tokens", {"label": "before", "scopes": ["admin"]})["token"]
        outcomes, over = list[str](), threading.Event()
        writer = threading.Thread(target=write_on, args=(old, outcomes, over))
        parted.part(apart=True)
        writer.start()
        try:
            wait_until(lambda: parted.successor() in {SECOND, THIRD}, "one of the others coordinates", FAILOVER_S)
            name = parted.successor()
            assert name is not None
            wait_until(
                lambda: "resigned" in seen(parted.node(FIRST)), "the old one has stepped down, untold", HEARTBEAT_S
            )
            with closing(parted.admin(name)) as new:
                new.post("/api/v1/api-tokens", {"label": "acknowledged", "scopes": ["read"]})
            assert all(line.there.effects.stalled_s > 1 for line in parted.lines.values())
            with pytest.raises(SwarmError) as refused:
                old.post(f"/api/v1/models/{MODEL}/unload", {"force": True})
            assert refused.value.code in REFUSED
        finally:
            over.set()
            parted.part(apart=False)
            writer.join()
    assert len(outcomes) > 1
    assert {*outcomes[:-1]} <= REFUSED, "what it was told while it was alone was not acknowledged"
    wait_until(lambda: answers(parted.local.api, token), "the old one's port leads to the new one", SERVED_S)
    assert parted.successor() == name
    with closing(parted.admin(name)) as new:
        labels = [entry["label"] for entry in new.get("/api/v1/api-tokens")["tokens"]]
        assert [label for label in labels if label != ALONE] == ["before", "acknowledged"]
        assert labels.count(ALONE) == outcomes.count("acknowledged")
        status = new.get(f"/api/v1/models/{MODEL}/status")
    assert {stage["peer"]: stage["pid"] for stage in status["stages"]} == workers
    assert all(map(alive, workers.values()))


def write_on(admin: ApiClient, outcomes: list[str], over: threading.Event) -> None:
    """One token after the other, as people who were not told of a partition; what each came to, by its code."""
    while not over.is_set():
        try:
            admin.post("/api/v1/api-tokens", {"label": ALONE, "scopes": ["read"]})
            outcomes.append("acknowledged")
        except SwarmError as error:
            outcomes.append(error.code)
        over.wait(0.1)
