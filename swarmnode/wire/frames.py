"""Frames as bytes: 4-byte big-endian length of what follows, a msgpack map as header, the raw body.

Nothing is allocated on the word of the other end: the length is held against a limit first, and the buffer grows only
with bytes that really came. The body is never looked at; routing reads the header alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgpack

from swarmnode.errors import ProtocolError
from swarmnode.wire import limits
from swarmnode.wire.table import KIND_KEY, kind_of

Buffer = bytes | bytearray | memoryview

LENGTH_BYTES = 4
_FIRST_LOOK_BYTES = 1 << 10
"""Most headers are shorter; only a longer one makes the parser take a second, larger bite."""
_SMALL_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Frame:
    """`header` holds the keys of the frame table for `kind`, without the kind itself."""

    kind: str
    header: dict[str, Any] = field(default_factory=dict)
    body: Buffer = b""
    checked: bool = field(default=False, compare=False, repr=False)
    """The header came in and was held against the table then: who only passes the frame on need not do so again."""


class Post(Protocol):
    """Sends some frames without waiting, those of one call in one write where they are small."""

    def __call__(self, *frames: Frame) -> None: ...


def encode(frame: Frame) -> tuple[bytes, Buffer]:
    """The frame as (length and header, body): two buffers, so that a large body is not copied here.

    Raises ProtocolError where the frame breaks the table: a bug shows at its sender. What a router adds to a header
    that came in is its own, and not looked at.
    """
    kind = kind_of(frame.kind)
    header = frame.header if frame.checked else kind.check_header(frame.header)
    size = len(frame.body)
    kind.check_body(header, size)
    packed: bytes = msgpack.packb({KIND_KEY: frame.kind, **header})
    if len(packed) > limits.MAX_HEADER_BYTES:
        raise ProtocolError(
            f"a {frame.kind} frame's header has {len(packed)} bytes; allowed are {limits.MAX_HEADER_BYTES}"
        )
    return (len(packed) + size).to_bytes(LENGTH_BYTES, "big") + packed, frame.body


def encode_bytes(frame: Frame) -> bytes:
    """The frame as one `bytes`."""
    return b"".join(encode(frame))


def frame_size(encoded: tuple[bytes, Buffer]) -> int:
    """Bytes of an encoded frame on the wire."""
    return len(encoded[0]) + len(encoded[1])


def check_length(length: int, most: int = limits.MAX_FRAME_BYTES) -> None:
    """Refuse a declared frame length before a byte of the frame is waited for."""
    if not 0 < length <= most:
        raise ProtocolError(f"a frame declares {length} bytes; allowed are 1 to {most}")


def decode(data: Buffer) -> Frame:
    """One frame from what follows its four length bytes; the body is a view of `data`, not a copy."""
    view = memoryview(data)
    check_length(len(view))
    header, end = _unpack_header(view)
    kind = kind_of(header.get(KIND_KEY))
    known = kind.check_header(header)
    kind.check_body(known, len(view) - end)
    return Frame(kind.name, known, view[end:], checked=True)


def _unpack_header(view: memoryview) -> tuple[dict[str, Any], int]:
    unpacker = msgpack.Unpacker(
        read_size=_FIRST_LOOK_BYTES,
        max_buffer_size=limits.MAX_HEADER_BYTES,
        strict_map_key=True,
        max_str_len=limits.MAX_HEADER_BYTES,
        max_bin_len=0,
        max_array_len=limits.MAX_ROWS * 16,
        max_map_len=64,
        max_ext_len=0,
        ext_hook=_refuse_extension,
    )
    fed = 0
    for end in (_FIRST_LOOK_BYTES, limits.MAX_HEADER_BYTES):
        piece = view[fed:end]
        fed += len(piece)
        try:
            unpacker.feed(piece)
            header = unpacker.unpack()
        except msgpack.OutOfData:
            continue
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise ProtocolError(f"a frame's header is not a msgpack map within the limits: {error!r:.200}") from None
        if not isinstance(header, dict):
            raise ProtocolError(f"a frame's header is {type(header).__name__}; it must be a map")
        return header, unpacker.tell()
    raise ProtocolError(f"a frame's header does not end within the frame or within {limits.MAX_HEADER_BYTES} bytes")


def _refuse_extension(code: int, data: bytes) -> object:
    raise ValueError(f"msgpack extension type {code} is not allowed ({len(data)} bytes)")


class FrameDecoder:
    """Bytes in, whole frames out. After a ProtocolError it must not be fed again.

    A large frame is put together once, from the pieces as they came: growing one buffer would copy it again.
    """

    def __init__(self, max_frame_bytes: int = limits.MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._parts: list[Buffer] = []
        self._wanted = LENGTH_BYTES
        self.buffered = 0
        """Bytes of a frame that is not whole yet."""

    def feed(self, data: Buffer) -> list[Frame]:
        """Take bytes as they came; returns the frames they completed, in order. `data` must not change afterwards."""
        self._keep(data)
        if self.buffered < self._wanted:
            return []
        whole = memoryview(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))
        self._parts, self.buffered = [], 0
        frames, rest, self._wanted = _split(whole, self.max_frame_bytes)
        self._keep(rest)
        return frames

    def _keep(self, data: Buffer) -> None:
        """Remember bytes; small ones are joined, so that a frame sent byte by byte costs no object per byte."""
        if not len(data):
            return
        self.buffered += len(data)
        if len(data) >= _SMALL_BYTES or not self._parts:
            self._parts.append(data)
        elif isinstance(self._parts[-1], bytearray):
            self._parts[-1] += data
        else:
            self._parts.append(bytearray(data))


def _split(view: memoryview, most: int) -> tuple[list[Frame], memoryview, int]:
    """The whole frames in `view`, what is left, and how much that has to grow to."""
    frames: list[Frame] = []
    start = 0
    while len(view) - start >= LENGTH_BYTES:
        length = int.from_bytes(view[start : start + LENGTH_BYTES], "big")
        check_length(length, most)
        end = start + LENGTH_BYTES + length
        if end > len(view):
            return frames, view[start:], end - start
        frames.append(decode(view[start + LENGTH_BYTES : end]))
        start = end
    return frames, view[start:], LENGTH_BYTES
