"""One machine's death breaks several links at once: what comes out of the nursery is still one error."""

from __future__ import annotations

import pytest
import trio

from swarmnode.errors import LinkBroken, ProtocolError, StageLost
from swarmnode.wire.nursery import alone, open_flat_nursery


async def lane(gone: trio.Event, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """A link in a nursery of its own with a user in another, as a dialed channel has them."""
    async with open_flat_nursery() as connection:
        connection.start_soon(trio.sleep_forever)
        task_status.started()
        async with open_flat_nursery() as user:
            user.start_soon(trio.sleep_forever)
            await gone.wait()
            raise LinkBroken("the next stage is gone")


async def break_all_at_once(leaving: trio.CancelScope | None = None) -> None:
    gone = trio.Event()
    async with open_flat_nursery() as lanes:
        for _ in range(3):
            await lanes.start(lane, gone)
        gone.set()
        if leaving is not None:
            leaving.cancel()
        await trio.sleep(1)


async def test_links_that_break_in_the_same_instant_are_one_broken_link(autojump_clock: object) -> None:
    with pytest.raises(LinkBroken, match="the next stage is gone"):
        await break_all_at_once()


async def test_a_link_that_breaks_while_its_user_leaves_is_no_failure(autojump_clock: object) -> None:
    with trio.CancelScope() as scope:
        await break_all_at_once(leaving=scope)
    assert scope.cancelled_caught


@pytest.mark.parametrize(
    ("errors", "spoken"),
    [
        ((LinkBroken("a"),), "a"),
        ((LinkBroken("a"), ExceptionGroup("", [StageLost("b")])), "a"),
        ((ExceptionGroup("", [ProtocolError("b")]), LinkBroken("a")), "b"),
        ((KeyError("bug"),), "'bug'"),
    ],
)
def test_the_first_failure_speaks_for_all(errors: tuple[Exception, ...], spoken: str) -> None:
    assert str(alone(ExceptionGroup("", errors))) == spoken


def test_a_bug_among_broken_links_stays_in_sight() -> None:
    group = ExceptionGroup("", [LinkBroken("a"), KeyError("bug")])
    assert alone(group) is group
