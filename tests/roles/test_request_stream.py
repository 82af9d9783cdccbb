"""A request as the gateway holds it: the head's frames in, one end out, whoever is slow."""

from __future__ import annotations

import pytest
import trio

from swarmnode.api.backend import Accepted, Done, Started, TextDelta
from swarmnode.errors import ContextTooLong, StageLost, Stalled, SwarmError
from swarmnode.ids import RequestId
from swarmnode.roles.requests import ACCEPT_S, MAX_UNREAD_EVENTS, RequestStream
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame

ACCEPTED = Frame("accepted", {"request": "q", "prompt_tokens": 12})
STARTED = Frame("started", {"request": "q"})
TEXT = Frame("text", {"request": "q", "text": "Hi", "n": 1})
DONE = Frame(
    "done",
    {"request": "q", "finish_reason": "stop", "prompt_tokens": 12, "completion_tokens": 1, "stop": "###"},
    pack_body({"stage0_ms": 1.5}),
)
ERROR = Frame("error", {"request": "q", "code": "context_too_long", "message": "too long", "param": "messages"})


class Held:
    """A stream and how often the head was told to stop."""

    def __init__(self) -> None:
        self.cancels = 0
        self.stream = RequestStream(RequestId("q"), self._cancel)

    def _cancel(self) -> None:
        self.cancels += 1


@pytest.fixture
def held() -> Held:
    return Held()


async def test_a_reply_comes_through_in_order_and_ends(held: Held) -> None:
    for frame in (ACCEPTED, STARTED, TEXT, DONE, TEXT):
        held.stream.put(frame)
    assert [await held.stream.next() for _ in range(3)] == [Accepted(12), Started(), TextDelta("Hi", 1)]
    done = await held.stream.next()
    assert isinstance(done, Done)
    assert (done.finish_reason, done.prompt_tokens, done.completion_tokens) == ("stop", 12, 1)
    assert (done.stop_sequence, done.timing) == ("###", {"stage0_ms": 1.5})
    assert held.stream.ended
    assert held.cancels == 0


@pytest.mark.parametrize(("told", "cached"), [(None, 0), (5, 5), (99, 12)])
async def test_cached_tokens_are_a_part_of_the_prompt(held: Held, told: int | None, cached: int) -> None:
    header = DONE.header if told is None else {**DONE.header, "cached": told}
    held.stream.put(Frame("done", header, DONE.body))
    done = await held.stream.next()
    assert isinstance(done, Done)
    assert done.cached_tokens == cached


async def test_an_error_is_raised_with_its_class_and_field(held: Held) -> None:
    held.stream.put(ERROR)
    with pytest.raises(ContextTooLong, match="too long") as raised:
        await held.stream.next()
    assert raised.value.param == "messages"


@pytest.mark.parametrize("first", [DONE, ERROR])
async def test_what_comes_after_the_end_is_dropped(held: Held, first: Frame) -> None:
    for frame in (ACCEPTED, first, TEXT, ERROR, DONE):
        held.stream.put(frame)
    held.stream.cancel(StageLost("gone"))
    await held.stream.next()
    try:
        await held.stream.next()
    except SwarmError:
        assert first is ERROR
    else:
        assert first is DONE
    with trio.move_on_after(0.01) as scope:
        await held.stream.next()
    assert scope.cancelled_caught
    assert held.cancels == 0


async def test_cancelling_tells_the_head_once(held: Held) -> None:
    held.stream.put(ACCEPTED)
    held.stream.cancel(StageLost("a stage was lost"))
    held.stream.cancel(StageLost("again"))
    assert held.cancels == 1
    assert await held.stream.next() == Accepted(12)
    with pytest.raises(StageLost, match="a stage was lost"):
        await held.stream.next()


async def test_a_request_nobody_takes_stalls(held: Held, autojump_clock: trio.testing.MockClock) -> None:
    start = trio.current_time()
    with pytest.raises(Stalled, match="30 s"):
        await held.stream.next()
    assert trio.current_time() - start == pytest.approx(ACCEPT_S)


async def test_an_accepted_request_may_wait_its_turn_for_as_long_as_it_takes(
    held: Held, autojump_clock: trio.testing.MockClock
) -> None:
    held.stream.put(ACCEPTED)
    await held.stream.next()
    with trio.move_on_after(10 * ACCEPT_S) as scope:
        await held.stream.next()
    assert scope.cancelled_caught


async def test_a_client_that_stops_reading_is_cut_off_and_the_head_told(held: Held) -> None:
    held.stream.put(ACCEPTED)
    for _ in range(MAX_UNREAD_EVENTS + 5):
        held.stream.put(TEXT)
    assert held.stream.ended
    assert held.cancels == 1
    for _ in range(MAX_UNREAD_EVENTS):
        await held.stream.next()
    with pytest.raises(Stalled, match="unread"):
        await held.stream.next()
