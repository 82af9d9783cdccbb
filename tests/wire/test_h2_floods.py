"""A peer that floods a session gets GOAWAY, and little before it; ordinary use is no flood."""

from __future__ import annotations

from typing import TYPE_CHECKING

import h2.config
import h2.connection
import hyperframe.frame as hf
import pytest

from swarmnode.errors import ProtocolError
from swarmnode.wire import limits
from swarmnode.wire.flood import Flood
from swarmnode.wire.h2_session import H2Session

if TYPE_CHECKING:
    from collections.abc import Callable


def attacked() -> tuple[H2Session, h2.connection.H2Connection]:
    """A server session and a bare h2 client with one open stream."""
    server = H2Session(client=False)
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    server.receive_data(client.data_to_send(), 0.0)
    return server, client


REQUEST = [(":method", "POST"), (":scheme", "https"), (":authority", "x"), (":path", "/channel/steps")]


def rapid_reset(client: h2.connection.H2Connection) -> bytes:
    stream = client.get_next_available_stream_id()
    client.send_headers(stream, REQUEST)
    client.reset_stream(stream)
    return client.data_to_send()


def made_reset(client: h2.connection.H2Connection) -> bytes:
    """A stream the server must reset itself: a WINDOW_UPDATE that overflows its window."""
    stream = client.get_next_available_stream_id()
    client.send_headers(stream, REQUEST)
    data = client.data_to_send() + hf.WindowUpdateFrame(stream, window_increment=2**31 - 1).serialize()
    client.reset_stream(stream)
    client.data_to_send()
    return data


def header_flood(client: h2.connection.H2Connection) -> bytes:
    frame = hf.HeadersFrame(1)
    frame.data = b"\x82"
    more = hf.ContinuationFrame(1)
    return frame.serialize() + more.serialize() * 100


def empty_data(client: h2.connection.H2Connection) -> bytes:
    data = b""
    if not client.streams:
        client.send_headers(1, REQUEST)
        data = client.data_to_send()
    return data + hf.DataFrame(1).serialize()


FLOODS = {
    "rapid reset": rapid_reset,
    "made reset": made_reset,
    "ping": lambda client: hf.PingFrame(0).serialize(),
    "settings": lambda client: hf.SettingsFrame(0).serialize(),
    "empty data": empty_data,
    "tiny window update": lambda client: hf.WindowUpdateFrame(0, window_increment=1).serialize(),
    "priority": lambda client: hf.PriorityFrame(3, depends_on=1, stream_weight=1).serialize(),
    "unknown frames": lambda client: b"\x00\x00\x00\xee\x00\x00\x00\x00\x00",
    "continuation": header_flood,
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_floods_end_the_connection_with_little_sent(flood: Callable[[h2.connection.H2Connection], bytes]) -> None:
    server, client = attacked()
    server.data_to_send()
    answered = 0

    def attack() -> None:
        nonlocal answered
        for _ in range(5000):
            server.receive_data(flood(client), 1.0)
            answered += len(server.data_to_send())

    with pytest.raises(ProtocolError, match=r"[Tt]oo many"):
        attack()
    assert server.closed
    assert isinstance(parsed(server.data_to_send())[-1], hf.GoAwayFrame)
    assert answered < 16_000


def parsed(data: bytes) -> list[hf.Frame]:
    frames = []
    while data:
        frame, length = hf.Frame.parse_frame_header(memoryview(data[:9]))
        frame.parse_body(memoryview(data[9 : 9 + length]))
        frames.append(frame)
        data = data[9 + length :]
    return frames


def ping(server: H2Session, every_s: float) -> None:
    for number in range(5000):
        server.receive_data(hf.PingFrame(0).serialize(), number * every_s)


def test_a_flood_is_answered_with_enhance_your_calm() -> None:
    server, _ = attacked()
    with pytest.raises(Flood):
        ping(server, every_s=0)
    assert parsed(server.data_to_send())[-1].error_code == 0xB


def test_slow_pings_are_no_flood() -> None:
    server, _ = attacked()
    for number in range(2000):
        server.receive_data(hf.PingFrame(0).serialize(), number * 0.2)
        server.data_to_send()


def test_answers_nobody_reads_end_the_connection() -> None:
    server, _ = attacked()
    with pytest.raises(Flood, match="reads none"):
        ping(server, every_s=1)


def test_an_overlong_http_frame_is_refused_when_it_is_announced() -> None:
    server, _ = attacked()
    with pytest.raises(ProtocolError, match="announced"):
        server.receive_data((limits.H2_FRAME_BYTES + 1).to_bytes(3, "big") + b"\x00\x00\x00\x00\x00\x01", 0.0)
