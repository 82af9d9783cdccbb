"""A ring whose hops go straight, through the relay and in requests, with a peer that reaches the API port alone."""

from __future__ import annotations

import random
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trio
from buffering_proxy import BufferingProxy, buffering_proxy
from local_swarms import REPLY, Swarm, start_swarm, wait_until
from toxics import ToxicProxy, toxic_proxy

from swarmnode.cli.local_swarm import NodeProcess
from swarmnode.cluster.join_token import parse_join_token
from swarmnode.ids import BootId
from swarmnode.roles.identity import NodeIdentity
from swarmnode.roles.joining import join_swarm
from swarmnode.wire.address import ApiUrl
from swarmnode.wire.link import Identity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
MODEL = "scripted-three"
NOWHERE = "127.0.0.1:9"
CLIENTS = 16
LONG = "abcdefghij" * 4
SEED = 7
CUTS = (0.0, 0.3, 0.0)
"""Seconds without the direct way: while there is none, the lanes go on in requests."""


class Ring:
    """Stage 0 on `den`, which knows of the coordinator only its API port behind a buffering proxy; stage 1 on `attic`,
    which all can dial at one of two addresses, a proxy that the test cuts; stage 2 on `cellar`, which nobody can."""

    def __init__(self, swarm: Swarm, cutting: ToxicProxy, buffering: BufferingProxy) -> None:
        self.swarm = swarm
        self.cutting = cutting
        self.buffering = buffering

    def start(self) -> None:
        local = self.swarm.local
        local.start_peers("attic", extra=("--advertise", self.cutting.place, "--advertise", NOWHERE))
        self.cutting.target = self.swarm.swarm_port("attic")
        local.start_peers("cellar", extra=("--advertise", NOWHERE))
        self._start_den()
        self.swarm.load(MODEL, peers=["den", "attic", "cellar"])

    def _start_den(self) -> None:
        local, url = self.swarm.local, self.buffering.url
        kept = NodeIdentity.open(local.folder / "den")
        token = replace(parse_join_token(local.join_token()), addresses=(url,))
        about = Identity(kept.node, BootId("first"), "den", ("peer",))
        trio.run(join_swarm, token, kept, about)
        kept.remember([ApiUrl(url)])
        arguments = ["--role", "peer", "--name", "den", "--data-dir", str(local.folder / "den"), "--device", "cpu"]
        arguments += ["--threads", "1", "--memory", "4G", "--advertise", NOWHERE]
        local.peers["den"] = NodeProcess(arguments, local.environment)
        assert local.peers["den"].wait_for("joined")["route"] == "polled"
        wait_until(lambda: "den" in self._offering(), "its first beat says what it offers")

    def _offering(self) -> set[str]:
        return {peer["name"] for peer in self.nodes()["peers"] if peer["state"] == "alive"}

    def nodes(self) -> dict[str, Any]:
        return self.swarm.client.get("/api/v1/nodes")

    def needs(self) -> dict[str, int]:
        """Tunnels and polled links of an idle ring: its lanes, and the control and requests connections of `den`."""
        routes = [link["route"] for link in self.links().values()]
        return {"tunnels": len(routes) - routes.count("direct"), "polled": routes.count("polled") + 2}

    def links(self) -> dict[str, dict[str, Any]]:
        """By lane."""
        return {link["lane"]: link for stage in self.swarm.status(MODEL)["stages"] for link in stage["links"]}


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory, models_root: Path) -> Iterator[Ring]:
    with ExitStack() as stack:
        swarm = start_swarm(tmp_path_factory.mktemp("routes"), models_root, peers=0)
        stack.callback(swarm.close)
        cutting = stack.enter_context(toxic_proxy())
        made = Ring(swarm, cutting, stack.enter_context(buffering_proxy(swarm.local.api)))
        made.start()
        yield made


def chat(swarm: Swarm, prompt: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": prompt}]
    return swarm.openai.chat.completions.create(model=MODEL, messages=messages, **options)  # type: ignore[call-overload]


def test_every_hop_takes_the_best_route_there_is(ring: Ring) -> None:
    reply = chat(ring.swarm, "hello")
    assert reply.choices[0].message.content == REPLY
    assert reply.model_extra["swarm"]["timing"]["route"] == "polled", "the worst of them"
    wait_until(lambda: ring.links()["tok"]["frames"] > 0, "a beat tells what was carried")
    links = ring.links()
    routes = {lane: link["route"] for lane, link in links.items()}
    assert routes == {"act": "direct", "pre": "direct", "act1": "relayed", "pre1": "relayed", "tok": "polled"}
    assert {lane for lane, link in links.items() if link.get("relayed_frames")} == {"act1", "pre1", "tok"}
    peers = {peer["name"]: peer["route"] for peer in ring.nodes()["peers"]}
    assert peers == {"attic": "direct", "cellar": "direct", "den": "polled"}
    assert ring.buffering.whole


def test_many_clients_that_leave_and_links_that_drop(ring: Ring) -> None:
    """Tokens stay right, and nothing is held afterwards: no session, no tunnel, no polled link but the ring's own."""
    wait_until(lambda: ring.nodes()["carried"] == ring.needs(), "what loading needed is gone")
    carried, wrong, over = ring.cutting.connections, list[str](), threading.Event()
    clients = [threading.Thread(target=be_a_client, args=(ring.swarm, SEED + n, wrong, over)) for n in range(CLIENTS)]
    for client in clients:
        client.start()
    for away_s in CUTS:
        time.sleep(0.7)
        ring.cutting.closed = away_s > 0
        ring.cutting.hang_up()
        time.sleep(away_s)
        ring.cutting.closed = False
    over.set()
    for client in clients:
        client.join()
    assert wrong == []
    assert ring.cutting.connections > carried, "the links were made again"
    wait_until(lambda: ring.swarm.quiet(MODEL), "nothing is held on any stage")
    wait_until(lambda: ring.nodes()["carried"] == ring.needs(), "the links are those of the idle ring")
    assert ring.swarm.status(MODEL)["state"] == "ready"
    assert chat(ring.swarm, "hello").choices[0].message.content == REPLY


def be_a_client(swarm: Swarm, seed: int, wrong: list[str], over: threading.Event) -> None:
    """One chat after the other, of which it leaves a third somewhere on the way."""
    dice = random.Random(seed)
    try:
        while not over.is_set():
            expected, leaves = LONG, dice.randrange(1, 60) if dice.random() < 0.33 else None
            text = read(chat(swarm, "long", stream=True, max_tokens=len(LONG)), leaves)
            if not (expected.startswith(text) and (leaves or text == expected)):
                wrong.append(text)
    except Exception as error:  # the test's thread has to hear of it
        wrong.append(repr(error))


def read(stream: Any, leaves_after: int | None) -> str:
    text = ""
    with stream:
        for number, chunk in enumerate(stream):
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            if number == leaves_after:
                break
    return text
