"""zstd on a lane's hidden states, where the link is slow enough to gain from it.

Floats compress badly as they lie: the exponents of neighbours are alike, their fractions are noise. So the bytes are
sorted first, all first bytes, then all second ones (as Blosc's shuffle does), and the noise costs nothing more than its
own size. What comes out is bounded by what the frame's own shape says, before anything is decompressed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import zstandard

from swarmnode.errors import ProtocolError
from swarmnode.wire.table import DTYPE_BYTES

if TYPE_CHECKING:
    from swarmnode.wire.frames import Buffer, Frame

ZIP_KEY = "zip"
SPLIT_ZSTD = "split-zstd"
LEVEL = 1
"""Of zstd: higher ones gain a few percent on such data and take several times as long."""
MAX_WINDOW_BYTES = 8 << 20
"""What a decompressor may be made to hold, whatever the other end says; level 1 uses 512 KiB."""
SMALL_BYTES = 2 << 10
"""Below this a frame's headers weigh as much as what could be saved."""
TRY_EVERY = 64
"""Frames between two looks at whether a lane that does not compress should."""
WORTH = 0.9
"""Compressing pays when the whole way takes this much less with it."""


def compress(frame: Frame) -> Frame:
    """The frame with its tensor compressed; unchanged where that makes it no smaller."""
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(_split(frame.body, DTYPE_BYTES[frame.header["dtype"]]))
    if len(packed) >= len(frame.body):
        return frame
    return replace(frame, header={**frame.header, ZIP_KEY: SPLIT_ZSTD}, body=packed)


def decompress(frame: Frame) -> Frame:
    """The frame as it was. Raises ProtocolError where the body is not what its header declares."""
    if ZIP_KEY not in frame.header:
        return frame
    size = frame.header["bytes"]
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    try:
        with decompressor.stream_reader(frame.body) as reader:
            data = reader.read(size)
            more = reader.read(1)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"a {frame.kind} frame's body cannot be decompressed: {error}") from None
    if len(data) != size or more:
        raise ProtocolError(f"a {frame.kind} frame declares {size} bytes and holds {'more' if more else len(data)}")
    header = {key: value for key, value in frame.header.items() if key != ZIP_KEY}
    return replace(frame, header=header, body=_join(data, DTYPE_BYTES[header["dtype"]]))


def _split(data: Buffer, width: int) -> bytes:
    """All first bytes of the values, then all second ones, …"""
    raw = bytes(data)
    return b"".join(raw[i::width] for i in range(width)) if width > 1 else raw


def _join(data: bytes, width: int) -> bytes | bytearray:
    if width == 1:
        return data
    count = len(data) // width
    joined = bytearray(len(data))
    for i in range(width):
        joined[i::width] = data[i * count : (i + 1) * count]
    return joined


@dataclass(slots=True)
class LaneCompression:
    """One lane's choice, from what its link and this machine were seen to do."""

    link_bytes_per_s: float | None = None
    """Measured; None: not known yet, so nothing is compressed."""
    ratio: float = 1.0
    """Compressed over plain bytes, of the last frames that were tried."""
    seconds_per_byte: float = 0.0
    """Of plain bytes, to compress them here; the other end needs less."""
    _since_tried: int = field(default=TRY_EVERY, init=False)

    @property
    def pays(self) -> bool:
        if self.link_bytes_per_s is None:
            return False
        plain_s = 1 / self.link_bytes_per_s
        return self.ratio * plain_s + 2 * self.seconds_per_byte < WORTH * plain_s

    def wants(self, frame: Frame) -> bool:
        """Whether to compress this frame: because it pays, or to see whether it would."""
        if "dtype" not in frame.header or len(frame.body) < SMALL_BYTES or self.link_bytes_per_s is None:
            return False
        self._since_tried += 1
        return self.pays or self._since_tried >= TRY_EVERY

    def apply(self, frame: Frame) -> Frame:
        """Compress, learn from it, and return what to send. Takes milliseconds for a prompt piece: not on an event
        loop."""
        began_s = time.perf_counter()
        packed = compress(frame)
        took_s = time.perf_counter() - began_s
        self._learn(len(packed.body) / len(frame.body), took_s / len(frame.body))
        return packed if self.pays else frame

    def _learn(self, ratio: float, seconds_per_byte: float) -> None:
        first = self._since_tried >= TRY_EVERY and not self.seconds_per_byte
        weight = 1.0 if first else 0.25
        self.ratio += weight * (ratio - self.ratio)
        self.seconds_per_byte += weight * (seconds_per_byte - self.seconds_per_byte)
        self._since_tried = 0
