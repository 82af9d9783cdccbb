"""Compressed hidden states: the same bytes again, bounded before they are made, and only where it pays."""

from __future__ import annotations

import random
import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import ProtocolError
from swarmnode.wire.compression import (
    SMALL_BYTES,
    TRY_EVERY,
    ZIP_KEY,
    LaneCompression,
    compress,
    decompress,
)
from swarmnode.wire.frames import Frame, decode, encode_bytes

WIDTHS = {"bfloat16": 2, "float32": 4, "int8": 1}


def group(body: bytes, dtype: str = "bfloat16") -> Frame:
    rows = len(body) // WIDTHS[dtype]
    header = {"dtype": dtype, "shape": [rows], "bytes": len(body)}
    return Frame("group", {"sessions": [1], "gens": [0], "poss": [0], "ns": [1], **header}, body)


def activations(count: int, seed: int = 0) -> bytes:
    """bfloat16 numbers as a model's rows hold them: of all signs and a few exponents."""
    draw = random.Random(seed)
    return b"".join(struct.pack("<f", draw.gauss(0, 1))[2:] for _ in range(count))


@given(st.binary(max_size=2000), st.sampled_from(sorted(WIDTHS)))
def test_what_was_compressed_comes_back(body: bytes, dtype: str) -> None:
    body = body[: len(body) // WIDTHS[dtype] * WIDTHS[dtype]]
    frame = group(body * 3, dtype)
    back = decompress(compress(frame))
    assert (bytes(back.body), back.header) == (frame.body, frame.header)


def test_activations_get_a_quarter_smaller_and_cross_the_wire() -> None:
    frame = group(activations(20_000))
    packed = compress(frame)
    assert len(packed.body) < 0.8 * len(frame.body)
    arrived = decode(encode_bytes(packed)[4:])
    assert bytes(decompress(arrived).body) == frame.body


def test_noise_is_sent_as_it_is() -> None:
    frame = group(random.Random(1).randbytes(20_000))
    assert compress(frame) is frame
    assert decompress(frame) is frame


@pytest.mark.parametrize("size", [1_999, 2_001, 50_000_000])
def test_a_body_that_holds_another_size_than_declared_is_refused(size: int) -> None:
    lying = group(bytes(2_000))
    bomb = Frame("group", {**lying.header, ZIP_KEY: "split-zstd"}, zstandard.ZstdCompressor().compress(bytes(size)))
    with pytest.raises(ProtocolError, match="declares 2000 bytes and holds"):
        decompress(bomb)


def test_a_body_that_is_no_zstd_is_refused() -> None:
    with pytest.raises(ProtocolError, match="cannot be decompressed"):
        decompress(Frame("group", {**group(bytes(100)).header, ZIP_KEY: "split-zstd"}, b"not zstd at all"))


def test_a_window_beyond_the_bound_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(19, window_log=27)
    body = (
        zstandard.ZstdCompressor(
            compression_params=parameters,
        )
        .compressobj()
        .compress(b"x")
        or b""
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    body = compressor.compress(bytes(2_000)) + compressor.flush()
    with pytest.raises(ProtocolError, match="cannot be decompressed"):
        decompress(Frame("group", {**group(bytes(2_000)).header, ZIP_KEY: "split-zstd"}, body))


def test_plain_frames_must_still_carry_what_they_declare() -> None:
    frame = group(bytes(2_000))
    with pytest.raises(ProtocolError):
        encode_bytes(Frame("group", frame.header, frame.body[:-1]))


def test_a_compressed_frame_larger_than_its_tensor_is_refused() -> None:
    frame = group(bytes(100))
    with pytest.raises(ProtocolError):
        encode_bytes(Frame("group", {**frame.header, ZIP_KEY: "split-zstd"}, bytes(101)))


@pytest.mark.parametrize(("mbit_per_s", "pays"), [(10, True), (100, True), (10_000, False)])
def test_it_is_done_on_slow_links_only(mbit_per_s: int, pays: bool) -> None:
    lane = LaneCompression(link_bytes_per_s=mbit_per_s * 125_000, ratio=0.75, seconds_per_byte=4e-9)
    assert lane.pays is pays


def test_nothing_is_tried_before_the_link_is_known_nor_for_small_frames() -> None:
    large, small = group(activations(SMALL_BYTES)), group(activations(100))
    assert not LaneCompression().wants(large)
    assert not LaneCompression(link_bytes_per_s=1e6).wants(small)
    assert not LaneCompression(link_bytes_per_s=1e6).wants(Frame("end", {"session": 1}))


def test_a_lane_learns_that_it_pays_and_looks_again_when_it_did_not() -> None:
    slow = LaneCompression(link_bytes_per_s=1e6)
    frame = group(activations(20_000))
    assert slow.wants(frame)
    assert ZIP_KEY in slow.apply(frame).header
    assert slow.pays
    fast = LaneCompression(link_bytes_per_s=1e12)
    assert fast.wants(frame)
    assert fast.apply(frame) is frame
    assert [fast.wants(frame) for _ in range(TRY_EVERY)] == [False] * (TRY_EVERY - 1) + [True]
