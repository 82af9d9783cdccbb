"""Whole conversations between the stages as text: read the files in traces/ to see how a ring talks.

After a wanted change of the rules, `REGENERATE_TRACES=1 pytest tests/ring/test_ring_traces.py` writes them anew; the
difference is part of the review.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ring_world import Link, Request, RingWorld, head_config

from swarmnode.compute.script import Reply, Script
from swarmnode.ids import SessionId

if TYPE_CHECKING:
    from collections.abc import Callable

TRACES = Path(__file__).parent / "traces"


def chat_over_two_stages() -> RingWorld:
    """A prompt of ten tokens in pieces of four, three tokens of reply, the end on both lanes."""
    world = RingWorld(head_config(2), Script(default=(71, 72), prefill_ms_per_token=2, decode_ms=5))
    world.probe()
    world.open(Request("chat", tuple(range(1, 11)), 20), at_s=0.1)
    return world


def two_chats_share_groups() -> RingWorld:
    """One decodes while the other's prompt comes in; then both go round in groups."""
    script = Script(default=(71, 72, 73, 74, 75, 76), prefill_ms_per_token=2, decode_ms=5)
    world = RingWorld(head_config(2), script)
    world.open(Request("first", (1, 2, 3), 6))
    world.open(Request("second", tuple(range(1, 9)), 4), at_s=0.03)
    return world


def cancel_in_prefill() -> RingWorld:
    """The client leaves while pieces stand in stage 1's queue: the end overtakes them and none of them runs."""
    slow = {1: Script(default=(71,), prefill_ms_per_token=10)}
    world = RingWorld(head_config(2), Script(default=(71,), prefill_ms_per_token=2), scripts=slow)
    world.open(Request("leaving", tuple(range(1, 25)), 20))
    world.cancel("leaving", at_s=0.035)
    return world


def failing_session() -> RingWorld:
    """Stage 1 of 3 fails one session: the head hears of it and ends it everywhere, the other goes on."""
    replies = (Reply(when=(5,), ids=(71,) * 9, fail_at=2, fail_layer=1), Reply(when=(6,), ids=(81, 82, 83)))
    world = RingWorld(head_config(3, max_group=2), Script(replies=replies, decode_ms=5), links=[Link(0.001)] * 3)
    world.open(Request("failing", (5,), 9))
    world.open(Request("going-on", (6,), 9))
    return world


def failing_in_a_group() -> RingWorld:
    """A forward fails for a group of two: it is run again one by one, and only the one that fails alone ends."""
    replies = (Reply(when=(5,), ids=(71,) * 9, fail_at=2), Reply(when=(6,), ids=(81, 82, 83)))
    world = RingWorld(head_config(1), Script(replies=replies, decode_ms=5))
    world.open(Request("failing", (5,), 9))
    world.open(Request("going-on", (6,), 9))
    return world


def link_lost() -> RingWorld:
    """The head hears of a broken link: everything ends once, and nothing more is sent."""
    world = RingWorld(head_config(3, max_in_flight=1), Script(default=(71,), then="repeat", decode_ms=5))
    world.open(Request("running", (1, 2), 20))
    world.open(Request("waiting", (1, 2), 20))
    world.run_until(0.09)
    world.lose_link(1)
    return world


def lost_cache() -> RingWorld:
    """Stage 1 has no cache for what comes: a gap, told to the head, which ends the session everywhere."""
    world = RingWorld(head_config(3), Script(default=(71,), then="repeat", decode_ms=5))
    world.open(Request("chat", (1, 2), 20))
    world.run_until(0.07)
    world.stages[0]._held.pop(SessionId(1))
    return world


def youngest_paused() -> RingWorld:
    """Two replies have used up what they had reserved, so the younger one is dropped. When the older has ended it reads
    its prompt and what it had said, and goes on with the next token."""
    config = head_config(2, kv_tokens=28, context_tokens=20, typical_tokens=4, prefill_chunk=16)
    world = RingWorld(config, Script(default=tuple(range(71, 99)), decode_ms=5), links=[Link(0.001)] * 2)
    world.open(Request("older", tuple(range(1, 11))))
    world.open(Request("younger", tuple(range(11, 21))))
    return world


def second_turn() -> RingWorld:
    """A conversation is parked at its end. Its second turn takes the caches over; another chat copies the beginning
    that it shares."""
    config = head_config(3, prefix_reuse=True, prefill_chunk=32)
    world = RingWorld(config, Script(default=(71, 72), decode_ms=5), links=[Link(0.001)] * 3)
    system = tuple(range(1, 41))
    world.open(Request("first-turn", (*system, 50), 9))
    world.open(Request("second-turn", (*system, 50, 71, 72, 0, 51), 9), at_s=0.2)
    world.open(Request("another", (*system, 60), 9), at_s=0.4)
    return world


def linked_anew() -> RingWorld:
    """A link is lost and the ring linked anew. Two conversations were parked; stage 2 has only one of them, so a
    second reset tells the others. Then the first one goes on."""
    config = head_config(3, prefix_reuse=True, prefill_chunk=0)
    world = RingWorld(config, Script(default=(71,), decode_ms=5), links=[Link(0.001)] * 3)
    first, second = tuple(range(1, 41)), tuple(range(101, 141))
    world.open(Request("first", first, 9))
    world.open(Request("second", second, 9))
    world.open(Request("running", (5, 6, 7), 99), at_s=0.1)
    world.run_until(0.11)
    world.stages[1]._parked.pop(SessionId(2))
    world.stages[1]._freed.append(SessionId(2))
    world.lose_link(1)
    world.open(Request("too-early", (5, 6, 7), 99), at_s=0.12)
    world.run_until(0.13)
    world.relink()
    world.open(Request("goes-on", (*first, 71, 0, 8), 9), at_s=0.2)
    return world


@pytest.mark.parametrize(
    "scene",
    [
        chat_over_two_stages,
        two_chats_share_groups,
        cancel_in_prefill,
        failing_session,
        failing_in_a_group,
        link_lost,
        lost_cache,
        youngest_paused,
        second_turn,
        linked_anew,
    ],
    ids=lambda scene: scene.__name__,
)
def test_the_ring_talks_as_recorded(scene: Callable[[], RingWorld]) -> None:
    world = scene()
    world.run_until_quiet()
    heading = "".join(f"# {line.strip()}\n" for line in (scene.__doc__ or "").strip().splitlines())
    text = heading + world.trace()
    path = TRACES / f"{scene.__name__}.txt"
    if os.environ.get("REGENERATE_TRACES"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
