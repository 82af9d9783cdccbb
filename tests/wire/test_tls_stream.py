"""Our TLS stream against the standard library's other end: every byte in any pieces, then the end or an error."""

from __future__ import annotations

import random
import ssl

import pytest
import trio
import trio.testing
from credentials import Swarm
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.wire import tls, tls_stream
from swarmnode.wire.tls_stream import TlsStream

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([16383, 16384, 16385, 40_000, 262_144, 300_001]))
OPERATION = st.tuples(st.sampled_from(["ours", "theirs"]), SIZES, st.sampled_from([None, 1, 700, 16384, 100_000]))


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    """A client's and a server's."""
    files = Swarm(tmp_path_factory.mktemp("swarm")).node("attic").files
    return tls._client_context(files), tls._server_context(files, enrolment=False)


class StandardEnd(trio.abc.Stream):
    """The transport below our stream, with the standard library's TLS at its other end; bytes come in any pieces."""

    def __init__(self, context: ssl.SSLContext, pieces: random.Random, *, server_side: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._pieces = pieces
        self._due = bytearray()
        self._news = trio.Event()
        self.ended = False
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self.shaken = False
        self.got = bytearray()
        self.said_goodbye = False
        self.refused: ssl.SSLError | None = None

    def write(self, data: bytes) -> None:
        self.tls.write(data)
        self.pump()

    def pump(self) -> None:
        """Let the other end do what it can with what it has."""
        try:
            if not self.shaken:
                self.tls.do_handshake()
                self.shaken = True
            while data := self.tls.read(50_000):
                self.got += data
            self.said_goodbye = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self.refused = error
        finally:
            self._due += self._outgoing.read()
            self._news.set()

    def end(self) -> None:
        self.ended = True
        self._news.set()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        rest = bytes(data)
        while rest:
            size = self._pieces.choice([1, 3, 5, 1000, 16_400, 1 << 20])
            self._incoming.write(rest[:size])
            rest = rest[size:]
            self.pump()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self._due and not self.ended:
            self._news = trio.Event()
            await self._news.wait()
        size = min(self._pieces.choice([1, 3, 5, 1000, 16_400, 1 << 20]), max_bytes or 1 << 20)
        data, self._due = bytes(self._due[:size]), self._due[size:]
        return data

    def damage(self) -> None:
        """Flip a bit of the last byte that is still to come: that record's tag."""
        self._due[-1] ^= 1

    def cut(self, n_bytes: int) -> None:
        del self._due[-n_bytes:]

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self.ended = True
        await trio.lowlevel.checkpoint()


async def shaken(contexts: Contexts, *, client: bool = True, seed: int = 0) -> tuple[TlsStream, StandardEnd]:
    ours, theirs = contexts if client else contexts[::-1]
    end = StandardEnd(theirs, random.Random(seed), server_side=client)
    if not client:
        end.pump()
    stream = TlsStream(end, ours, server_side=not client)
    await stream.do_handshake()
    end.pump()
    assert end.shaken
    return stream, end


async def read_exactly(stream: TlsStream, size: int, most: int | None) -> bytes:
    got = bytearray()
    while len(got) < size:
        data = await stream.receive_some(most)
        assert 0 < len(data) <= (most or 1 << 20)
        got += data
    return bytes(got)


@settings(max_examples=40, deadline=None)
@given(st.lists(OPERATION, max_size=8), st.booleans(), st.integers(0, 2**32))
def test_every_byte_passes_in_any_pieces(
    contexts: Contexts, operations: list[tuple[str, int, int | None]], client: bool, seed: int
) -> None:
    async def run() -> None:
        stream, end = await shaken(contexts, client=client, seed=seed)
        sent = bytearray()
        for who, size, most in operations:
            most = most if most != 1 or size < 1000 else 999  # a byte at a time takes its time
            data = random.Random(size).randbytes(size)
            if who == "ours":
                await stream.send_all(data)
                sent += data
                assert end.got == sent
            else:
                end.write(data)
                assert await read_exactly(stream, size, most) == data
        end.end()
        assert await stream.receive_some() == b""
        await stream.aclose()
        assert end.said_goodbye, "the close alert"

    trio.run(run)


async def test_one_read_gives_all_the_records_that_came(contexts: Contexts) -> None:
    near, far = trio.testing.memory_stream_pair()
    ours, theirs = TlsStream(near, contexts[0]), trio.SSLStream(far, contexts[1], server_side=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.do_handshake)
        await theirs.do_handshake()
    await theirs.send_all(bytes(100_000))
    assert len(await ours.receive_some()) == 100_000
    assert ours.peer_certificate() == theirs.getpeercert(binary_form=True)


async def test_both_directions_at_once(contexts: Contexts) -> None:
    near, far = trio.testing.memory_stream_pair()
    ours, theirs = TlsStream(near, contexts[0]), trio.SSLStream(far, contexts[1], server_side=True)
    data = random.Random(1).randbytes(1_000_000)

    async def collect(stream: trio.abc.Stream) -> None:
        got = bytearray()
        while len(got) < len(data):
            got += await stream.receive_some(65_536)
        assert got == data

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.do_handshake)
        await theirs.do_handshake()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for stream in (ours, theirs):
                nursery.start_soon(stream.send_all, data)
                nursery.start_soon(collect, stream)


async def test_the_close_alert_ends_the_stream_while_the_socket_stays_open(contexts: Contexts) -> None:
    stream, end = await shaken(contexts)
    end.write(b"the last words")
    with pytest.raises(ssl.SSLWantReadError):
        end.tls.unwrap()
    end.pump()
    assert await read_exactly(stream, 14, None) == b"the last words"
    with trio.fail_after(1):
        assert await stream.receive_some() == b""
        assert await stream.receive_some() == b""


@pytest.mark.parametrize("missing", [1, 10, 30])
async def test_an_end_inside_a_record_is_an_end(contexts: Contexts, missing: int) -> None:
    stream, end = await shaken(contexts)
    end.write(b"whole")
    assert await read_exactly(stream, 5, None) == b"whole"
    end.write(bytes(20))
    end.cut(missing)
    end.end()
    assert await stream.receive_some() == b""


async def test_a_damaged_record_is_told_of_and_breaks_both_directions(contexts: Contexts) -> None:
    stream, end = await shaken(contexts)
    end.write(b"whole")
    end.damage()
    with pytest.raises(trio.BrokenResourceError) as raised:
        await read_exactly(stream, 5, None)
    assert isinstance(raised.value.__cause__, ssl.SSLError)
    assert "ALERT_BAD_RECORD_MAC" in str(end.refused)
    with pytest.raises(trio.BrokenResourceError):
        await stream.send_all(b"more")
    with pytest.raises(trio.BrokenResourceError):
        await stream.receive_some()
    await stream.aclose()


@pytest.mark.parametrize("said", [b"", b"\x16", b"\x16\x03\x03\x00\x7a\x02", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
async def test_a_hangup_in_the_handshake_breaks_it(contexts: Contexts, said: bytes) -> None:
    near, far = trio.testing.memory_stream_pair()
    stream = TlsStream(near, contexts[0])
    await far.send_all(said)
    await far.send_eof()
    with pytest.raises(trio.BrokenResourceError):
        await stream.do_handshake()


async def test_a_cancelled_send_breaks_the_stream(contexts: Contexts) -> None:
    near, far = trio.testing.lockstep_stream_pair()
    ours, theirs = TlsStream(near, contexts[0]), trio.SSLStream(far, contexts[1], server_side=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.do_handshake)
        await theirs.do_handshake()
    with trio.move_on_after(0.02) as scope:
        await ours.send_all(b"nobody reads this")
    assert scope.cancelled_caught
    with pytest.raises(trio.BrokenResourceError, match="cancelled"):
        await ours.send_all(b"nor this")


async def test_a_second_sender_is_refused(contexts: Contexts) -> None:
    near, far = trio.testing.lockstep_stream_pair()
    ours, theirs = TlsStream(near, contexts[0]), trio.SSLStream(far, contexts[1], server_side=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.do_handshake)
        await theirs.do_handshake()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.send_all, b"first")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await ours.send_all(b"second")
        assert await theirs.receive_some() == b"first"


async def test_a_closed_stream_says_so(contexts: Contexts) -> None:
    stream, _ = await shaken(contexts)
    await stream.aclose()
    await stream.aclose()
    for call in (stream.send_all(b"x"), stream.receive_some(), stream.wait_send_all_might_not_block()):
        with pytest.raises(trio.ClosedResourceError):
            await call


async def test_answers_that_nobody_takes_are_bounded(contexts: Contexts, monkeypatch: pytest.MonkeyPatch) -> None:
    """What OpenSSL owes waits for our next write; a peer cannot make it pile up."""
    monkeypatch.setattr(tls_stream, "MAX_OWED_BYTES", 5)
    stream, end = await shaken(contexts)
    end.write(b"data")
    stream._outgoing.write(bytes(6))
    with pytest.raises(trio.BrokenResourceError):
        await read_exactly(stream, 4, None)


async def test_a_stranger_costs_no_buffer(contexts: Contexts) -> None:
    near, _ = trio.testing.memory_stream_pair()
    assert len(TlsStream(near, contexts[1], server_side=True)._plain) == 0
