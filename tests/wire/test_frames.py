"""Frames: what is encoded comes back however it is cut; what breaks a rule is a ProtocolError and nothing else."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarmnode.errors import ProtocolError
from swarmnode.ids import RingId
from swarmnode.wire import limits
from swarmnode.wire.bodies import pack_body, unpack_body
from swarmnode.wire.frames import LENGTH_BYTES, Frame, FrameDecoder, decode, encode, encode_bytes
from swarmnode.wire.lane import LaneSender
from swarmnode.wire.table import KINDS

TENSOR = {"dtype": "bfloat16", "shape": [1, 3], "bytes": 6}
GROUP = {"sessions": [1], "gens": [0], "poss": [4], "ns": [1], **TENSOR}


def raw_frame(header: Any, body: bytes = b"") -> bytes:
    payload = msgpack.packb(header) + body
    return len(payload).to_bytes(4, "big") + payload


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = [0, *sorted(point % (len(data) + 1) for point in points), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


frames = st.one_of(
    st.builds(lambda n: Frame("end", {"session": n}), st.integers(0, 2**63 - 1)),
    st.builds(lambda n, b: Frame("data", {"offset": n}, b), st.integers(0, 9), st.binary(max_size=3000)),
    st.builds(lambda t: Frame("text", {"request": "q", "text": t, "n": 1}), st.text(max_size=400)),
    st.just(Frame("group", GROUP, b"abcdef")),
    st.just(Frame("shutdown")),
)


@given(st.lists(frames, max_size=8), st.lists(st.integers(0), max_size=12))
def test_frames_survive_any_cut(sent: list[Frame], points: list[int]) -> None:
    decoder = FrameDecoder()
    data = b"".join(map(encode_bytes, sent))
    assert [frame for part in cut(data, points) for frame in decoder.feed(part)] == sent
    assert decoder.buffered == 0


@given(st.binary(max_size=200), st.lists(st.integers(0), max_size=5))
@example(b"\x00\x00\x00\x05\xc1\xc1\xc1\xc1\xc1", [])
@example(b"\x00\x00\x00\x04\xd6\xff\x00\x00", [])
def test_random_bytes_raise_only_protocol_errors(data: bytes, points: list[int]) -> None:
    decoder = FrameDecoder()
    try:
        for part in cut(data, points):
            decoder.feed(part)
    except ProtocolError:
        pass


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(sorted(KINDS)), st.dictionaries(st.text(), values, max_size=3), st.data())
def test_any_values_in_known_keys_raise_only_protocol_errors(name: str, extra: dict[str, Any], data: Any) -> None:
    keys = data.draw(st.dictionaries(st.sampled_from(sorted(KINDS[name].keys) or ["x"]), values))
    body = data.draw(st.binary(max_size=20))
    try:
        (frame,) = FrameDecoder().feed(raw_frame({**extra, **keys, "k": name}, body))
    except ProtocolError:
        return
    assert set(frame.header) <= set(KINDS[name].keys)
    assert encode(frame)


def test_body_is_a_view_and_routing_adds_keys_without_copying_it() -> None:
    data = encode_bytes(Frame("group", GROUP, b"abcdef"))
    (frame,) = FrameDecoder().feed(data)
    assert isinstance(frame.body, memoryview)
    assert frame.body.obj is data
    _, body = encode(Frame(frame.kind, {**frame.header, "lane": "act", "seq": 1}, frame.body))
    assert body is frame.body


def test_a_frame_that_came_in_travels_on_as_one_that_was_made_here() -> None:
    rows = {"sessions": [5], "gens": [0], "poss": [1], "ns": [1]}
    made = Frame("tokens", {"lane": "tok", **rows, "tokens": [7]})
    came = decode(encode_bytes(made)[LENGTH_BYTES:])
    assert came.checked
    assert not made.checked
    on = [encode_bytes(LaneSender(RingId("r1"), "tok", (3, 0)).stamp(frame)) for frame in (made, came)]
    assert on[0] == on[1]
    with pytest.raises(ProtocolError, match="sessions"):
        encode_bytes(Frame("tokens", {**came.header, "sessions": []}))


def test_unknown_keys_are_left_out_and_unknown_kinds_named() -> None:
    (frame,) = FrameDecoder().feed(raw_frame({"k": "end", "session": 3, "later": [1, {"a": 2}]}))
    assert frame == Frame("end", {"session": 3})
    with pytest.raises(ProtocolError, match="unknown frame kind 'warp'"):
        FrameDecoder().feed(raw_frame({"k": "warp"}))


@pytest.mark.parametrize("length", [0, limits.MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_bad_length_is_refused_before_the_frame_came(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"declares {length} bytes"):
        FrameDecoder().feed(length.to_bytes(4, "big"))
    decoder = FrameDecoder()
    decoder.feed(length.to_bytes(4, "big")[:2])
    with pytest.raises(ProtocolError, match=f"declares {length} bytes"):
        decoder.feed(length.to_bytes(4, "big")[2:])


def test_a_huge_declared_frame_allocates_nothing() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(limits.MAX_FRAME_BYTES.to_bytes(4, "big") + b"\x81") == []
    assert decoder.buffered == 5


DEEP = b"\x81\xa1k" + b"\x91" * 5000 + b"\x01"
BAD_HEADERS: dict[str, bytes] = {
    "not a map": msgpack.packb(["k", "end"]),
    "number as key": msgpack.packb({"k": "end", 5: 1}),
    "binary value": msgpack.packb({"k": "end", "session": b"x"}),
    "extension": b"\x82\xa1k\xa3end\xa7session\xd6\x05abcd",
    "timestamp": b"\x82\xa1k\xa3end\xa7session\xd6\xff\x00\x00\x00\x00",
    "bad utf-8": b"\x82\xa1k\xa3end\xa1\xff\x01",
    "long array declared": b"\x82\xa1k\xa3end\xa7session\xdd\xff\xff\xff\xff",
    "long map declared": b"\xdf\xff\xff\xff\xff\xa1k",
    "long text declared": b"\x81\xdb\xff\xff\xff\xff",
    "truncated": msgpack.packb({"k": "end", "session": 2**40})[:-1],
    "deep": DEEP,
    "no kind": msgpack.packb({"session": 1}),
    "kind is a list": msgpack.packb({"k": ["end"], "session": 1}),
    "too long": msgpack.packb({"k": "end", "pad": "x" * limits.MAX_HEADER_BYTES, "session": 1}),
    "reserved byte": b"\xc1",
}


@pytest.mark.parametrize("header", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_bad_headers(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        FrameDecoder().feed(len(header).to_bytes(4, "big") + header)


BAD_TENSORS = {
    "bytes do not match the shape": ({**GROUP, "bytes": 5}, b"abcde"),
    "body shorter than declared": (GROUP, b"abcde"),
    "body longer than declared": (GROUP, b"abcdefg"),
    "unknown dtype": ({**GROUP, "dtype": "complex128"}, b"abcdef"),
    "dimension 0": ({**GROUP, "shape": [0, 3]}, b"abcdef"),
    "negative dimension": ({**GROUP, "shape": [-1, -3]}, b"abcdef"),
    "rank 5": ({**GROUP, "shape": [1, 1, 1, 1, 3]}, b"abcdef"),
    "no shape": ({**GROUP, "shape": []}, b"abcdef"),
    "overflowing shape": ({**GROUP, "shape": [2**24] * 4}, b"abcdef"),
    "dtype missing": ({key: value for key, value in GROUP.items() if key != "dtype"}, b"abcdef"),
}


@pytest.mark.parametrize(("header", "body"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensors(header: dict[str, Any], body: bytes) -> None:
    with pytest.raises(ProtocolError):
        FrameDecoder().feed(raw_frame({"k": "group", **header}, body))
    with pytest.raises(ProtocolError):
        encode(Frame("group", header, body))


def test_a_body_where_none_belongs_is_refused() -> None:
    with pytest.raises(ProtocolError, match="allowed are 0"):
        FrameDecoder().feed(raw_frame({"k": "end", "session": 1}, b"x"))
    with pytest.raises(ProtocolError, match="allowed are"):
        encode(Frame("data", {"offset": 0}, bytes(limits.MAX_CHUNK_BYTES + 1)))


def test_the_largest_piece_fits() -> None:
    body = memoryview(bytearray(limits.MAX_BODY_BYTES))
    header = {
        "session": 2**63 - 1, "gen": 0, "pos": 0, "ids": [2**31 - 1] * 1024, "last": True,
        "dtype": "float32", "shape": [1024, 16384], "bytes": len(body),
    }  # fmt: skip
    prefix, same = encode(Frame("piece", header, body))
    assert same is body
    assert decode(prefix[4:] + body).header == header
    ids = {**header, "ids": [2**31 - 1] * limits.MAX_POSITIONS, "shape": [4096, 1], "bytes": 4096 * 4}
    assert encode(Frame("piece", ids, bytes(4096 * 4)))


@pytest.mark.parametrize("value", [-1, 2**63, True, 1.0, "1", None, [1]])
def test_an_integer_key_takes_integers_only(value: object) -> None:
    with pytest.raises(ProtocolError, match="session="):
        encode(Frame("end", {"session": value}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, True, "1"])
def test_times_are_finite_and_not_negative(value: object) -> None:
    with pytest.raises(ProtocolError, match="wait_ms="):
        encode(Frame("group", {**GROUP, "wait_ms": value}, b"abcdef"))
    with pytest.raises(ProtocolError, match="ms="):
        encode(Frame("group", {**GROUP, "ms": [1.0, value]}, b"abcdef"))


@given(st.dictionaries(st.text(max_size=5), values, max_size=4))
def test_bodies_come_back(value: dict[str, Any]) -> None:
    assert repr(unpack_body(pack_body(value))) == repr(value)


@given(st.binary(max_size=100))
def test_random_bodies_raise_only_protocol_errors(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        unpack_body(data)


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def test_bodies_are_bounded() -> None:
    assert unpack_body(pack_body(nested(limits.MAX_BODY_DEPTH)))
    with pytest.raises(ProtocolError, match="nests deeper"):
        pack_body(nested(limits.MAX_BODY_DEPTH + 1))
    with pytest.raises(ProtocolError, match="nests deeper"):
        unpack_body(msgpack.packb(nested(limits.MAX_BODY_DEPTH + 1)))
    for data in (
        msgpack.packb([1]), b"\xc1", b"\x81\xa1a", msgpack.packb({1: 2}), msgpack.packb({b"a": 2}),
        b"\x81\xa1a\xd4\x05\x00",
        b"\xdf\xff\xff\xff\xff", b"\x81\xa1a" + b"\x91" * 2000 + b"\x01", bytes(limits.MAX_MAP_BODY_BYTES + 1),
        b"\x81\xa1a\xd6\xff\x00\x00\x00\x00",
    ):  # fmt: skip
        with pytest.raises(ProtocolError):
            unpack_body(data)
