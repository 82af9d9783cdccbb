"""Two HTTP/2 sessions back to back, without I/O: every byte arrives once and in order, or the channel is reset."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import hyperframe.frame as hf
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmnode.errors import LinkBroken, Overloaded, ProtocolError
from swarmnode.wire import h2_session as h2s
from swarmnode.wire import limits
from swarmnode.wire.h2_session import H2Session

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
REQUEST = [(":method", "POST"), (":scheme", "https"), (":authority", "x"), (":path", "/channel/steps")]


@dataclass
class End:
    """A session with what it saw: a consumer that takes data only when told to."""

    session: H2Session
    sent: dict[int, bytearray] = field(default_factory=lambda: defaultdict(bytearray))
    got: dict[int, bytearray] = field(default_factory=lambda: defaultdict(bytearray))
    untaken: list[h2s.Data] = field(default_factory=list)
    opened: list[h2s.ChannelId] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    reset: set[int] = field(default_factory=set)
    auto_take: bool = True

    def receive(self, data: bytes) -> None:
        for event in self.session.receive_data(data, 0.0):
            if isinstance(event, h2s.Opened):
                self.opened.append(event.channel)
                self.session.accept(event.channel)
            elif isinstance(event, h2s.Data):
                self.got[event.channel] += event.data
                self.untaken.append(event)
            elif isinstance(event, h2s.Ended):
                self.ended.add(event.channel)
            elif isinstance(event, h2s.Reset):
                self.reset.add(event.channel)
        if self.auto_take:
            self.take()

    def take(self) -> None:
        for event in self.untaken:
            self.session.consumed(event.channel, event.credit)
        self.untaken.clear()

    def send(self, channel: h2s.ChannelId, data: bytes) -> None:
        self.session.send(channel, data)
        self.sent[channel] += data


def pair() -> tuple[End, End]:
    ends = End(H2Session(client=True)), End(H2Session(client=False))
    settle(*ends)
    return ends


def settle(one: End, other: End) -> None:
    """Carry bytes both ways until both are quiet."""
    while True:
        there, back = one.session.data_to_send(), other.session.data_to_send()
        if not there and not back:
            return
        if there:
            other.receive(there)
        if back:
            one.receive(back)


def test_bytes_flow_both_ways_and_end() -> None:
    client, server = pair()
    channel = client.session.open_channel("/channel/steps")
    client.send(channel, b"hello")
    settle(client, server)
    assert server.opened == [channel]
    server.send(channel, b"world")
    server.session.finish(channel)
    client.session.finish(channel)
    settle(client, server)
    assert bytes(server.got[channel]) == b"hello"
    assert bytes(client.got[channel]) == b"world"
    assert client.ended == server.ended == {channel}
    with pytest.raises(LinkBroken):
        client.session.send(channel, b"more")


def test_windows_and_frame_size_are_raised_on_both_ends() -> None:
    client, server = pair()
    channel = client.session.open_channel("/channel/steps")
    settle(client, server)
    for end in (client, server):
        connection = end.session._h2
        assert connection.outbound_flow_control_window >= limits.STREAM_WINDOW_BYTES * limits.MAX_CHANNELS
        assert connection.local_flow_control_window(channel) == limits.STREAM_WINDOW_BYTES
        assert connection.max_outbound_frame_size == limits.H2_FRAME_BYTES
        assert connection.max_inbound_frame_size == limits.H2_FRAME_BYTES


def test_a_consumer_that_stalls_holds_up_its_own_channel_only() -> None:
    client, server = pair()
    server.auto_take = False
    slow, fast = (client.session.open_channel("/channel/steps") for _ in range(2))
    client.send(slow, bytes(limits.STREAM_WINDOW_BYTES + 5000))
    settle(client, server)
    assert len(server.got[slow]) == limits.STREAM_WINDOW_BYTES
    assert client.session.queued_bytes(slow) == 5000
    client.send(fast, b"x" * 100_000)
    settle(client, server)
    assert len(server.got[fast]) == 100_000
    server.take()
    settle(client, server)
    assert len(server.got[slow]) == limits.STREAM_WINDOW_BYTES + 5000


def test_stalled_channels_cannot_use_up_the_connection() -> None:
    client, server = pair()
    server.auto_take = False
    for _ in range(limits.MAX_CHANNELS - 1):
        client.session.send(client.session.open_channel("/channel/files"), bytes(limits.STREAM_WINDOW_BYTES + 1))
        settle(client, server)
        server.got.clear()
    last = client.session.open_channel("/channel/steps")
    client.send(last, b"through")
    settle(client, server)
    assert bytes(server.got[last]) == b"through"
    with pytest.raises(Overloaded):
        client.session.open_channel("/channel/steps")


def test_credit_of_channels_that_are_gone_comes_back() -> None:
    client, server = pair()
    server.auto_take = False
    for _ in range(3 * limits.MAX_CHANNELS):
        channel = client.session.open_channel("/channel/files")
        client.session.send(channel, bytes(limits.STREAM_WINDOW_BYTES))
        settle(client, server)
        client.session.reset(channel)
        settle(client, server)
        server.take()
        server.got.clear()
        settle(client, server)
    window = client.session._h2.outbound_flow_control_window
    assert window > limits.STREAM_WINDOW_BYTES * limits.MAX_CHANNELS // 2


def test_credit_that_is_held_back_stalls_nobody_and_comes_back_with_the_channel() -> None:
    window_bytes = 16 << 10
    client, server = End(H2Session(client=True)), End(H2Session(client=False, window_bytes=window_bytes))
    settle(client, server)
    long_one = client.session.open_channel("/channel/steps")
    client.send(long_one, bytes(100 * window_bytes))
    settle(client, server)
    assert len(server.got[long_one]) == 100 * window_bytes
    part = bytes(window_bytes // 8 - 1)
    for number in range(window_bytes * limits.MAX_CHANNELS // len(part) + 100):
        channel = client.session.open_channel("/channel/steps")
        client.send(channel, part)
        client.session.finish(channel)
        settle(client, server)
        assert server.ended == {channel}, f"channel {number}"
        server.session.finish(channel)
        settle(client, server)
        server.ended.clear()


def data_frame(channel: int, size: int, flags: int = 0) -> bytes:
    return size.to_bytes(3, "big") + bytes([0, flags]) + channel.to_bytes(4, "big") + bytes(size)


def test_data_frames_go_their_short_way_and_the_windows_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = pair()
    channel = client.session.open_channel("/channel/steps")
    settle(client, server)
    long_way: list[str] = []
    receive = h2.connection.H2Connection._receive_frame

    def count(connection: h2.connection.H2Connection, frame: object) -> list[h2.events.Event]:
        long_way.append(type(frame).__name__)
        return receive(connection, frame)

    monkeypatch.setattr(h2.connection.H2Connection, "_receive_frame", count)
    server.auto_take = False
    for end in (client, server):
        end.send(channel, bytes(1000))
    settle(client, server)
    assert (len(server.got[channel]), long_way) == (1000, [])
    assert client.session._h2.local_flow_control_window(channel) == limits.STREAM_WINDOW_BYTES - 1000
    assert server.session._h2.remote_flow_control_window(channel) == limits.STREAM_WINDOW_BYTES - 1000
    client.session.finish(channel)
    settle(client, server)
    assert long_way == ["DataFrame"], "the one that ends the stream"


@pytest.mark.parametrize("size", [limits.H2_FRAME_BYTES, 1])
def test_more_data_than_the_window_allows_ends_the_connection(size: int) -> None:
    client, server = pair()
    server.auto_take = False
    channel = client.session.open_channel("/channel/steps")
    settle(client, server)
    for _ in range(limits.STREAM_WINDOW_BYTES // limits.H2_FRAME_BYTES):
        server.receive(data_frame(channel, limits.H2_FRAME_BYTES))
    with pytest.raises(ProtocolError, match="broke HTTP/2"):
        server.receive(data_frame(channel, size))
    assert server.session.closed


def test_data_where_none_may_come_is_refused_on_the_short_way_too() -> None:
    client, server = pair()
    channel = client.session.open_channel("/channel/steps")
    settle(client, server)
    server.session.reset(channel)
    settle(client, server)
    server.receive(data_frame(channel, 5))  # it was under way: nobody hears of it
    assert server.got[channel] == b""
    with pytest.raises(ProtocolError):
        server.receive(data_frame(channel + 98, 5))


def test_data_before_the_headers_of_an_answer_is_refused() -> None:
    client, _ = pair()
    channel = client.session.open_channel("/channel/steps")  # nobody has accepted it
    with pytest.raises(ProtocolError, match="broke HTTP/2"):
        client.receive(data_frame(channel, 5))


def test_data_within_a_block_of_headers_is_refused() -> None:
    client, server = pair()
    known = client.session.open_channel("/channel/steps")
    settle(client, server)
    client.session.open_channel("/channel/steps")
    begun = bytearray(client.session.data_to_send())
    begun[4] &= ~0x4  # END_HEADERS: it goes on in a CONTINUATION, which has to come next
    server.receive(bytes(begun))
    with pytest.raises(ProtocolError):
        server.receive(data_frame(known, 5))


def test_channels_take_turns() -> None:
    client, server = pair()
    big, small = (client.session.open_channel("/channel/steps") for _ in range(2))
    client.send(big, bytes(4 << 20))
    client.send(small, b"token")
    server.receive(client.session.data_to_send())
    assert bytes(server.got[small]) == b"token"
    assert len(server.got[big]) < 4 << 20


def test_a_write_is_bounded() -> None:
    client, server = pair()
    channel = client.session.open_channel("/channel/steps")
    settle(client, server)
    client.send(channel, bytes(6 << 20))
    assert len(client.session.data_to_send()) < limits.WRITE_BYTES + limits.DATA_FRAME_BYTES


def test_small_buffers_travel_in_one_http_frame() -> None:
    client, server = pair()
    channel = client.session.open_channel("/channel/steps")
    settle(client, server)
    for number in range(100):
        client.send(channel, bytes([number]))
    assert len(client.session.data_to_send()) == 9 + 100


def test_reset_drops_what_is_queued_and_reaches_the_peer() -> None:
    client, server = pair()
    channel = client.session.open_channel("/channel/steps")
    client.send(channel, bytes(100))
    settle(client, server)
    client.send(channel, bytes(1000))
    client.session.reset(channel)
    settle(client, server)
    assert server.reset == {channel}
    assert len(server.got[channel]) == 100
    assert client.session.idle
    assert server.session.idle


def test_finish_with_reset_behind_lets_the_queue_out_first() -> None:
    client, server = pair()
    channel = client.session.open_channel("/channel/steps")
    client.send(channel, b"last words")
    client.session.finish(channel, reset_after=True)
    settle(client, server)
    assert bytes(server.got[channel]) == b"last words"
    assert server.ended == server.reset == {channel}


@pytest.mark.parametrize("by", ["us", "the peer", "an error"])
def test_a_closed_session_wants_no_write_whatever_is_queued(by: str) -> None:
    client, server = pair()
    channel = client.session.open_channel("/channel/steps")
    client.session.send(channel, bytes(100))
    if by == "us":
        client.session.close()
    elif by == "the peer":
        server.session.close()
        client.receive(server.session.data_to_send())
    else:
        with pytest.raises(ProtocolError):
            client.session.receive_data(b"\xff" * 9, 0.0)
    client.session.data_to_send()
    client.session.finish(channel)
    assert not client.session.wants_write
    assert client.session.data_to_send() == b""


def test_goaway_reaches_the_peer() -> None:
    client, server = pair()
    client.session.close()
    (event,) = server.session.receive_data(client.session.data_to_send(), 0.0)
    assert event == h2s.Closed(0)
    with pytest.raises(ProtocolError, match="after the connection was closed"):
        server.session.receive_data(b"x", 0.0)
    with pytest.raises(LinkBroken, match="is closed"):
        client.session.open_channel("/channel/steps")


def test_streams_of_a_cancelled_channel_in_flight_are_no_flood() -> None:
    """The other end keeps sending for one round trip after a reset; its DATA must not count against it."""
    client, server = pair()
    channel = client.session.open_channel("/channel/steps")
    settle(client, server)
    on_their_way = []
    for _ in range(900):
        client.send(channel, b"x")
        on_their_way.append(client.session.data_to_send())
    server.session.reset(channel)
    for data in on_their_way:
        server.receive(data)
    settle(client, server)
    assert client.reset == {channel}


# -- fuzz


@settings(max_examples=200)
@given(st.booleans(), st.booleans(), st.lists(st.binary(max_size=60), max_size=6))
@example(True, False, [b"\x00\x00\x00\x04\x00\x00\x00\x00\x00", b"\x00\x00\x09\x01\x04\x00\x00\x00\x01" + b"\xff" * 9])
def test_random_bytes_raise_only_protocol_errors(preface: bool, client: bool, parts: list[bytes]) -> None:
    session = H2Session(client=client)
    session.data_to_send()
    with contextlib.suppress(ProtocolError):
        session.receive_data(PREFACE if preface and not client else b"", 0.0)
        for part in parts:
            session.receive_data(part, 0.0)
    session.data_to_send()


http_frames = st.tuples(
    st.integers(0, 12), st.integers(0, 255), st.sampled_from([0, 1, 2, 3, 5, 2**31 - 1]), st.binary(max_size=40)
).map(lambda f: len(f[3]).to_bytes(3, "big") + bytes([f[0], f[1]]) + f[2].to_bytes(4, "big") + f[3])


@settings(max_examples=200)
@given(st.booleans(), st.lists(http_frames, max_size=12))
def test_random_http_frames_raise_only_protocol_errors(client: bool, frames: list[bytes]) -> None:
    session = H2Session(client=client)
    if client:
        session.open_channel("/channel/steps")
    with contextlib.suppress(ProtocolError):
        session.receive_data((b"" if client else PREFACE) + hf.SettingsFrame(0).serialize(), 0.0)
        if not client:
            attacker = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
            attacker.initiate_connection()
            attacker.data_to_send()
            attacker.send_headers(1, REQUEST)
            session.receive_data(attacker.data_to_send(), 0.0)
        for frame in frames:
            for event in session.receive_data(frame, 0.0):
                if isinstance(event, h2s.Opened):
                    session.accept(event.channel)
    session.data_to_send()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.just(0), st.just(0)),
        st.tuples(st.sampled_from(["send", "finish", "reset", "take"]), st.integers(0, 3), st.integers(0, 400_000)),
        st.tuples(st.sampled_from(["there", "back"]), st.integers(0, 3), st.integers(1, 100_000)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(actions, st.booleans())
@example([("open", 0, 0), ("send", 0, 361_123)], False)
def test_every_byte_arrives_once_in_order_or_the_channel_is_reset(
    steps: list[tuple[str, int, int]], lazy: bool
) -> None:
    client, server = End(H2Session(client=True)), End(H2Session(client=False))
    client.auto_take = server.auto_take = not lazy
    wires = {"there": bytearray(), "back": bytearray()}
    channels: list[h2s.ChannelId] = []
    local_resets: set[int] = set()
    for action, which, amount in steps:
        end = (client, server)[which % 2]
        channel = channels[which % len(channels)] if channels else None
        if action == "open":
            channels.append(client.session.open_channel("/channel/steps"))
        elif action in wires:
            carry(client, server, wires, action, amount)
        elif action == "take":
            end.take()
        elif channel is not None and (end is client or channel in server.opened):
            act(end, action, channel, amount, local_resets)
    client.auto_take = server.auto_take = True
    for end in (client, server):
        end.take()
    for direction in ("there", "back"):
        carry(client, server, wires, direction, 1 << 30)
    settle(client, server)
    for channel in channels:
        gone = channel in local_resets | client.reset | server.reset
        for sender, receiver in ((client, server), (server, client)):
            assert bytes(sender.sent[channel]).startswith(bytes(receiver.got[channel]))
            assert gone or sender.sent[channel] == receiver.got[channel]


def act(end: End, action: str, channel: h2s.ChannelId, amount: int, local_resets: set[int]) -> None:
    if action == "reset":
        if channel in end.session._out:
            local_resets.add(channel)
        end.session.reset(channel)
    elif action == "finish":
        end.session.finish(channel)
    else:
        with contextlib.suppress(LinkBroken):
            end.send(
                channel, bytes((len(end.sent[channel]) + i) % 251 for i in range(amount % 5000)) * (1 + amount // 5000)
            )


def carry(client: End, server: End, wires: dict[str, bytearray], direction: str, amount: int) -> None:
    source, sink = (client, server) if direction == "there" else (server, client)
    wire = wires[direction]
    wire += source.session.data_to_send()
    data, wires[direction] = bytes(wire[:amount]), wire[amount:]
    if data:
        sink.receive(data)
