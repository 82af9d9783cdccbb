"""HTTP over a channel: bytes as they were, ends as they were meant, and answers that come early, late or broken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.errors import LinkBroken, ProtocolError
from swarmnode.roles.http_channel import MAX_HEADER_BYTES, Call, ChannelStream, receive_http, send_http
from swarmnode.wire.frames import Frame
from swarmnode.wire.limits import MAX_HTTP_BYTES
from swarmnode.wire.memory import memory_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.wire.link import Channel

POST = [(b"host", b"x"), (b"content-length", b"4")]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


@given(parts=st.lists(st.binary(max_size=200_000), max_size=6), sizes=st.lists(st.integers(1, 100_000), min_size=1))
@settings(max_examples=30, deadline=None)
def test_bytes_come_as_they_were_written_whatever_the_parts(parts: list[bytes], sizes: Sequence[int]) -> None:
    async def run() -> bytes:
        near, far = (ChannelStream(end) for end in memory_pair("api"))
        got = b""

        async def write() -> None:
            for part in parts:
                await near.send_all(part)
            await near.send_eof()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            turn = 0
            while data := await far.receive_some(sizes[turn % len(sizes)]):
                assert len(data) <= sizes[turn % len(sizes)]
                got, turn = got + data, turn + 1
            await far.send_eof()
            nursery.cancel_scope.cancel()
        return got

    assert trio.run(run) == b"".join(parts)


async def test_an_abort_breaks_both_ends() -> None:
    near, far = (ChannelStream(end) for end in memory_pair("api"))
    near.abort()
    for stream in (near, far):
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(b"x")


async def test_frames_that_are_no_bytes_break_it() -> None:
    near, far = memory_pair("api")
    await near.send(Frame("end", {"session": 1}))
    with pytest.raises(ProtocolError, match="brought end"):
        await receive_http(far)


async def request_of(far: Channel) -> bytes:
    await trio.testing.wait_all_tasks_blocked()
    return bytes(await receive_http(far))


async def test_an_answer_that_comes_before_the_body_is_sent() -> None:
    near, far = memory_pair("api")
    call = Call(near)
    await call.begin("POST", "/v1/x", POST)
    assert (await request_of(far)).startswith(b"POST /v1/x HTTP/1.1\r\n")
    await send_http(far, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
    status, headers = await call.answer()
    assert (status, headers) == (413, [(b"content-length", b"2")])
    assert [await call.next_part(), await call.next_part()] == [b"no", b""]
    await call.hang_up()
    with pytest.raises(LinkBroken):  # half a request is no clean end
        await receive_http(far)


async def test_a_whole_call_ends_cleanly_on_both_sides() -> None:
    near, far = memory_pair("api")
    call = Call(near)
    await call.begin("POST", "/", POST)
    await call.send_body(b"four")
    await call.end()
    await send_http(far, OK)
    assert (await call.answer())[0] == 200
    assert [await call.next_part(), await call.next_part()] == [b"hi", b""]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call.hang_up)
        while await receive_http(far):
            pass
        far.end_sending()


BROKEN = {
    "an end before the answer": b"",
    "an end inside the head": OK[:20],
    "an end inside the body": OK[:-1],
    "no HTTP": b"\x00\x01 nonsense\r\n\r\n",
    "a head without end": b"HTTP/1.1 200 OK\r\nx: " + b"y" * (2 * MAX_HEADER_BYTES),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
async def test_an_answer_that_breaks_off_is_a_broken_link(data: bytes) -> None:
    near, far = memory_pair("api")
    call = Call(near)
    await call.begin("GET", "/", [(b"host", b"x")])
    await call.end()
    await send_http(far, data)
    far.end_sending()
    with pytest.raises(LinkBroken):
        await read_all(call)


async def read_all(call: Call) -> None:
    await call.answer()
    while await call.next_part():
        pass


async def test_an_end_that_the_other_side_never_answers_is_waited_for_shortly(autojump_clock: object) -> None:
    near, _ = memory_pair("api")
    call = Call(near)
    await call.begin("GET", "/", [(b"host", b"x")])
    await call.end()
    began_s = trio.current_time()
    with trio.CancelScope() as scope:
        scope.cancel()
        await call.hang_up()
    assert 0 < trio.current_time() - began_s <= 2


async def test_one_piece_at_most_waits_for_a_slow_reader() -> None:
    """`send` only queues; without waiting for the link a reply of any length would lie in memory."""

    class Slow:
        waiting = most = 0

        async def send(self, frame: Frame) -> None:
            self.waiting += len(frame.body)
            self.most = max(self.most, self.waiting)
            await trio.lowlevel.checkpoint()

        async def flush(self) -> None:
            self.waiting = 0
            await trio.lowlevel.checkpoint()

    slow = Slow()
    await send_http(slow, bytes(10 * MAX_HTTP_BYTES))  # type: ignore[arg-type]
    assert slow.most == MAX_HTTP_BYTES
    assert slow.waiting == 0
