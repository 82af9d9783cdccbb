"""Headers that tell the truth are read, every kind of lie is refused by name."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from swarmnode.catalog.safetensors_header import (
    DTYPE_BYTES,
    MAX_HEADER_BYTES,
    MAX_NAME_CHARS,
    TensorEntry,
    encode_header,
    parse_header,
    read_header,
)
from swarmnode.errors import InvalidModel

if TYPE_CHECKING:
    from pathlib import Path


def tensor(begin: int, end: int, dtype: str = "U8", shape: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def parse(fields: Any, data_bytes: int) -> dict[str, TensorEntry]:
    header = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return parse_header(header, 8 + len(header) + data_bytes, "x.safetensors")


def test_offsets_are_absolute_and_in_file_order() -> None:
    fields = {"b": tensor(4, 12, "F32", [2]), "a": tensor(0, 4), "__metadata__": {"format": "pt"}}
    begin = 8 + len(json.dumps(fields).encode())
    entries = parse(fields, 12)
    assert list(entries) == ["a", "b"]
    assert entries["b"] == TensorEntry("F32", (2,), begin + 4, begin + 12)
    assert (entries["b"].size_bytes, entries["b"].params) == (8, 2)


def test_the_library_and_this_reader_agree(tiny_llama: Path) -> None:
    path = tiny_llama / "model.safetensors"
    entries, raw = read_header(path), path.read_bytes()
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(entries)
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            array = file.get_tensor(name)
            assert array.shape == entries[name].shape
            assert array.tobytes() == raw[entries[name].begin : entries[name].end]


LIES: dict[str, tuple[Any, int, str]] = {
    "ends beyond the file": ({"a": tensor(0, 8)}, 4, "cut short"),
    "overlap": ({"a": tensor(0, 8), "b": tensor(4, 12)}, 12, "inside the tensor before"),
    "same span twice": ({"a": tensor(0, 8), "b": tensor(0, 8)}, 8, "inside the tensor before"),
    "hole": ({"a": tensor(0, 4), "b": tensor(8, 12)}, 12, "belong to none"),
    "hole at the front": ({"a": tensor(4, 8)}, 8, "belong to none"),
    "tail": ({"a": tensor(0, 4)}, 9, "after the last tensor"),
    "shape larger than span": ({"a": tensor(0, 8, "F32", [1000])}, 8, "spans 8 bytes"),
    "shape smaller than span": ({"a": tensor(0, 8, "F32", [1])}, 8, "spans 8 bytes"),
    "product beyond 64 bits": ({"a": tensor(0, 8, "F32", [1 << 40, 1 << 40])}, 8, "spans 8 bytes"),
    "wraps to zero in 64 bits": ({"a": tensor(0, 0, "U8", [1 << 32, 1 << 32])}, 0, "spans 0 bytes"),
    "reversed": ({"a": tensor(8, 0, "U8", [8])}, 8, "not [begin, end]"),
    "negative": ({"a": tensor(-8, 0, "U8", [8])}, 8, "not [begin, end]"),
    "negative size": ({"a": tensor(0, 4, "U8", [-2, -2])}, 4, "not a list of up to"),
    "boolean size": ({"a": tensor(0, 1, "U8", [True])}, 1, "not a list of up to"),
    "fraction": ({"a": tensor(0, 1, "U8", [1.0])}, 1, "not a list of up to"),
    "huge offset": ({"a": tensor(0, 1 << 70, "U8", [1 << 70])}, 8, "not a list of up to"),
    "17 dimensions": ({"a": tensor(0, 1, "U8", [1] * 17)}, 1, "not a list of up to"),
    "three offsets": ({"a": tensor(0, 1) | {"data_offsets": [0, 1, 2]}}, 1, "not [begin, end]"),
    "unknown dtype": ({"a": tensor(0, 4, "Q4_1")}, 4, "'Q4_1' is not one of"),
    "dtype no string": ({"a": tensor(0, 4) | {"dtype": ["U8"]}}, 4, "is not one of"),
    "missing field": ({"a": {"dtype": "U8", "shape": [4]}}, 4, "exactly dtype, shape"),
    "extra field": ({"a": tensor(0, 4) | {"code": "x"}}, 4, "exactly dtype, shape"),
    "no object": ({"a": [0, 4]}, 4, "exactly dtype, shape"),
    "empty name": ({"": tensor(0, 4)}, 4, "printable"),
    "long name": ({"x" * (MAX_NAME_CHARS + 1): tensor(0, 4)}, 4, "printable"),
    "control character": ({"a\nb": tensor(0, 4)}, 4, "printable"),
    "lone surrogate": (b'{"\\ud800": {"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', 4, "printable"),
    "name twice": (b'{"a": 1, "a": 2}', 0, "'a' occurs twice"),
    "no JSON": (b"{", 0, "not valid JSON"),
    "no UTF-8": (b'{"\xff": 1}', 0, "not valid JSON"),
    "a list": (b"[]", 0, "not a JSON object"),
    "deep": (b"[" * 200_000, 0, "not valid JSON"),
    "digits without end": (b'{"a": ' + b"9" * 10_000 + b"}", 0, "not valid JSON"),
    "empty": (b"", 0, "not valid JSON"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_refused(lie: str) -> None:
    fields, data_bytes, reason = LIES[lie]
    with pytest.raises(InvalidModel) as raised:
        parse(fields, data_bytes)
    assert raised.value.message.startswith("x.safetensors: ")
    assert reason in raised.value.message
    assert len(raised.value.message) < 1000


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes are too few"),
        (b"\0" * 7, "7 bytes are too few"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), "allowed are"),
        (b"\xff" * 8, "allowed are"),
        ((100).to_bytes(8, "little") + b"{}", "cut short"),
        ((0).to_bytes(8, "little"), "not valid JSON"),
    ],
)
def test_a_wrong_length_is_refused_before_anything_is_read(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(InvalidModel, match=r"model\.safetensors") as raised:
        read_header(path)
    assert reason in raised.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"gone\.safetensors: cannot be read"):
        read_header(tmp_path / "gone.safetensors")


@settings(deadline=None)
@given(header=st.binary(max_size=200), data_bytes=st.integers(0, 64))
def test_any_bytes_are_read_or_refused(header: bytes, data_bytes: int) -> None:
    try:
        entries = parse(header, data_bytes)
    except InvalidModel:
        return
    check_truth(entries, 8 + len(header), data_bytes)


sizes = st.one_of(st.integers(-2, 20), st.sampled_from([1 << 31, 1 << 62, 1 << 63, 1 << 64, True, 1.0, None, "4"]))
entries_like = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BYTES, "F4", 8, None]),
        "shape": st.lists(sizes, max_size=3),
        "data_offsets": st.lists(sizes, max_size=3),
    }
)


@settings(deadline=None)
@given(fields=st.dictionaries(st.text(max_size=4), entries_like, max_size=4), data_bytes=st.integers(0, 64))
def test_what_is_accepted_is_true(fields: dict[str, Any], data_bytes: int) -> None:
    try:
        entries = parse(fields, data_bytes)
    except InvalidModel:
        return
    check_truth(entries, 8 + len(json.dumps(fields).encode()), data_bytes)


def check_truth(entries: dict[str, TensorEntry], begin: int, data_bytes: int) -> None:
    """The accepted spans cover the data exactly, each as long as its tensor."""
    for entry in entries.values():
        assert entry.begin == begin
        assert entry.size_bytes == DTYPE_BYTES[entry.dtype] * math.prod(entry.shape)
        begin = entry.end
    assert data_bytes == sum(entry.size_bytes for entry in entries.values())


@settings(deadline=None)
@given(
    tensors=st.dictionaries(
        st.text("abc.é", min_size=1, max_size=8),
        st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    )
)
def test_a_written_header_is_read_back(tensors: dict[str, tuple[str, list[int]]]) -> None:
    head = encode_header((name, dtype, tuple(shape)) for name, (dtype, shape) in tensors.items())
    assert len(head) % 8 == 0
    data_bytes = sum(DTYPE_BYTES[dtype] * math.prod(shape) for dtype, shape in tensors.values())
    entries = parse_header(head[8:], len(head) + data_bytes, "x.safetensors")
    assert {name: (e.dtype, list(e.shape)) for name, e in entries.items()} == tensors
