"""The race between ways: rows of (route, delay, outcome), the winner, and the virtual second it is known at."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from swarmnode.errors import LinkBroken
from swarmnode.wire.dialing import HEAD_START_S, PREFER_S, Way, dial_best

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from swarmnode.wire.link import Channel

H, P = HEAD_START_S, PREFER_S


class FakeWay:
    """Comes up, or fails, `delay_s` after it was tried; knows whether somebody still holds it or waits for it."""

    def __init__(self, route: str, delay_s: float, outcome: str) -> None:
        self.way = Way(route, self.open, f"{route}-{delay_s}")
        self.held = False
        self._delay_s = delay_s
        self._outcome = outcome

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Channel]:
        self.held = True
        try:
            await trio.sleep(self._delay_s)
            if self._outcome == "fails":
                raise LinkBroken("refused")
            yield object()  # type: ignore[misc]
        finally:
            self.held = False


RACES = [
    # (ways, index of the winner, when it is decided)
    pytest.param([("direct", 0.05, "up")], 0, 0.05, id="direct at once"),
    pytest.param([("direct", 0.05, "up"), ("relayed", 0.0, "up")], 0, 0.05, id="relay never tried"),
    pytest.param([("direct", 0.1, "fails"), ("relayed", 0.2, "up")], 1, 0.3, id="relay as soon as direct failed"),
    pytest.param([("direct", 9.0, "up"), ("relayed", 0.1, "up")], 1, H + 0.1 + P, id="direct too late"),
    pytest.param([("direct", 0.5, "up"), ("relayed", 0.1, "up")], 0, 0.5, id="a better way soon after is waited for"),
    pytest.param(
        [("direct", 9.0, "fails"), ("relayed", 0.1, "fails"), ("polled", 0.2, "up")], 2, 2 * H + 0.2 + P, id="polled"
    ),
    pytest.param(
        [("direct", 0.3, "up"), ("direct", 0.01, "up"), ("relayed", 0.0, "up")], 1, 0.01, id="the faster address"
    ),
]


@pytest.mark.parametrize(("rows", "winner", "decided_s"), RACES)
async def test_race(
    rows: list[tuple[str, float, str]], winner: int, decided_s: float, autojump_clock: MockClock
) -> None:
    fakes = [FakeWay(*row) for row in rows]
    began_s = trio.current_time()
    async with dial_best([fake.way for fake in fakes]) as dialed:
        assert dialed.way is fakes[winner].way
        assert trio.current_time() - began_s == pytest.approx(decided_s)
        await trio.sleep(20)
        assert [fake.held for fake in fakes] == [fake is fakes[winner] for fake in fakes]
    assert not any(fake.held for fake in fakes)


async def test_all_ways_failed_tells_of_each(autojump_clock: MockClock) -> None:
    fakes = [FakeWay("direct", 0.1, "fails"), FakeWay("relayed", 0.1, "fails")]
    with pytest.raises(LinkBroken, match=r"direct direct-0\.1: refused; relayed relayed-0\.1: refused"):
        async with dial_best([fake.way for fake in fakes]):
            pass


async def test_a_way_that_breaks_later_ends_the_block(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def breaks() -> AsyncIterator[Channel]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_break_soon)
            yield object()  # type: ignore[misc]

    async def _break_soon() -> None:
        await trio.sleep(3)
        raise LinkBroken("the connection broke")

    with trio.fail_after(10), pytest.raises(BaseException) as caught:
        async with dial_best([Way("direct", breaks)]):
            await trio.sleep_forever()
    assert "the connection broke" in repr(caught.value)


async def test_leaving_early_closes_every_attempt(autojump_clock: MockClock) -> None:
    fakes = [FakeWay("direct", 30.0, "up"), FakeWay("relayed", 30.0, "up")]
    with trio.move_on_after(1):
        async with dial_best([fake.way for fake in fakes]):
            pytest.fail("nothing can be up yet")
    assert not any(fake.held for fake in fakes)
