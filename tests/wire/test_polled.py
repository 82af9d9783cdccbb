"""The two ways of a polled stream, and what lets a frame through a node before the requests that carry the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from swarmnode.wire import polled
from swarmnode.wire.carried import MAX_BUNDLE
from swarmnode.wire.polled import ByteWay, let_on

if TYPE_CHECKING:
    import pytest

HANDS = 50
"""Tasks, one after the other: more than any way through a node has."""


async def test_what_was_handed_on_is_through_before_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polled, "LET_ON_S", 60.0)  # the machine may be slow, but it comes to rest
    handed = [trio.Event() for _ in range(HANDS + 1)]

    async def hand_on(number: int) -> None:
        await handed[number].wait()
        handed[number + 1].set()

    async with trio.open_nursery() as nursery:
        for number in range(HANDS):
            nursery.start_soon(hand_on, number)
        handed[0].set()
        await let_on()
        assert handed[-1].is_set()


async def test_a_node_that_is_never_at_rest_sends_its_requests_all_the_same() -> None:
    async def busy() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(busy)
        with trio.fail_after(5):
            await let_on()
        nursery.cancel_scope.cancel()


async def test_no_body_claims_more_frames_than_a_header_may_say() -> None:
    way = ByteWay()
    for frames in (polled.MAX_BUNDLE_FRAMES - 1, MAX_BUNDLE):
        await way.put(b"x", frames)
    assert await way.take() == (b"xx", MAX_BUNDLE)
