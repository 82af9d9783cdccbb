"""The lines that `up` keeps on a terminal, after each of a node's events."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from swarmnode.ui.sentences import sentence
from swarmnode.ui.up_view import UpView

READY: dict[str, Any] = {
    "name": "desk",
    "swarm": "127.0.0.1:7700",
    "api": "http://127.0.0.1:7701",
    "roles": ["coordinator"],
    "coordinates": True,
}


def shown(view: UpView, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def after(*events: tuple[str, dict[str, Any]]) -> list[str]:
    view = UpView()
    for event, values in events:
        view.apply(event, values)
    return shown(view)


def test_a_coordinator_says_who_is_there_and_what_is_loaded() -> None:
    den, attic = {"node": "n1", "name": "den"}, {"node": "n2", "name": "attic\x1b[2J"}
    assert after() == ["starting"]
    where = "desk  swarm port 127.0.0.1:7700  API http://127.0.0.1:7701/v1"
    events: list[tuple[str, dict[str, Any]]] = [("ready", READY)]
    assert after(*events) == [where, "no peers yet", "no model is loaded"]
    events += [("peer_joined", den), ("peer_joined", attic), ("ring_loading", {"model": "m", "stages": 2})]
    assert after(*events) == [where, "2 peers: attic?[2J, den", "models: m loading"]
    events += [("peer_left", attic), ("ring_ready", {"model": "m", "stages": 2}), ("ring_loading", {"model": "b"})]
    assert after(*events) == [where, "1 peer: den", "models: b loading, m ready"]
    events += [("ring_over", {"model": "m"}), ("ring_evicted", {"model": "b", "for": "c"}), ("of_tomorrow", {})]
    assert after(*events)[2] == "models: b unloading"
    events += [("ring_over", {"model": "b"}), ("ring_restoring", {"model": "b", "why": "its peer is gone"})]
    assert after(*events)[2] == "models: b restoring"
    assert after(*events, ("ring_let_go", {"model": "b"}))[2] == "no model is loaded"


def test_a_peer_says_whether_it_is_connected() -> None:
    ready = ("ready", {"name": "den", "swarm": "127.0.0.1:1", "roles": ["peer"]})
    assert after(ready) == ["den  swarm port 127.0.0.1:1", "connecting to the coordinator"]
    assert after(ready, ("joined", {"coordinator": "desk:7700"}))[1] == "connected to desk:7700"
    lost = ("coordinator_lost", {"reason": "x"})
    assert after(ready, lost)[1] == "not connected to the coordinator; trying again"


def test_a_coordinator_that_comes_back_says_whom_it_follows() -> None:
    back = ("ready", READY | {"coordinates": False})
    assert after(back)[1:] == ["connecting to the coordinator"]
    follows = ("following", {"node": "n1", "name": "den\x1b"})
    assert after(back, follows)[1:] == ["following den?, which coordinates"]
    assert after(follows, back)[1:] == ["following den?, which coordinates"], "it may be known before"
    again: list[tuple[str, dict[str, Any]]] = [back, follows, ("coordinating", {"term": 9})]
    assert after(*again)[1:] == ["no peers yet", "no model is loaded"]
    again += [("ring_ready", {"model": "m"}), ("resigned", {"term": 9})]
    assert after(*again)[1:] == ["waiting for the voters to elect who coordinates"]
    assert "add a peer" in sentence("ready", READY)
    assert "add a peer" not in sentence(*back)
    assert sentence(*follows) == "den? coordinates the swarm now, and this node follows it"


def test_a_narrow_terminal_gets_as_many_lines_each_cut() -> None:
    view = UpView()
    view.apply("ready", READY)
    lines = shown(view, width=20)
    assert len(lines) == 3
    assert all(len(line) <= 20 for line in lines)


def test_events_as_sentences() -> None:
    assert sentence("coordinator_lost", {"reason": "gone"}) == "not connected to the coordinator: gone; trying again"
    assert sentence("ring_evicted", {"model": "a", "for": "b"}) == "a is being unloaded to make room for b"
    loading = {"model": "a", "stages": 2, "left_out": {"den": "busy: it serves b", "x\x1b[2J": "far"}}
    assert sentence("ring_loading", loading) == (
        "a is being loaded over 2 stages; without den: busy: it serves b; without x?[2J: far"
    )
    assert sentence("ring_loading", loading | {"left_out": {}}) == "a is being loaded over 2 stages"
    one = {"model": "a", "stages": 1, "left_out": {}}
    assert sentence("ring_loading", one) == "a is being loaded over 1 stage"
    dropped = {"model": "a", "name": "den"}
    assert (
        sentence("ring_peers_dropped", dropped) == "a: den, which it was to run on, was removed; any peers will do now"
    )
    assert sentence("straggler", {"name": "den", "times": 4.5}).startswith("den is 4.5 times as slow as the others")
    assert sentence("straggler_recovered", {"name": "den", "times": 1.1}).startswith("den is about as fast")
    assert sentence("ring_idle", {"model": "a", "idle_s": 900}) == "a was idle for 900 s and is being unloaded"
    assert sentence("ring_over", {"model": "a", "error": None}) == "a is no longer loaded"
    assert sentence("ring_restoring", {"model": "a", "why": "b is gone"}) == "a is being loaded again: b is gone"
    assert sentence("ring_waits", {"model": "a", "waits_for": "two peers"}).endswith("to be loaded again: two peers")
    assert sentence("ring_let_go", {"model": "a"}) == "a is not to be loaded again any more"
    assert sentence("of_tomorrow", {"x": 1}) == "of_tomorrow x=1"
    assert sentence("ready", READY).splitlines()[1] == "OpenAI endpoint http://127.0.0.1:7701/v1"
