"""docs/wire.md and the code say the same: tables, limits, deadlines and golden bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from swarmnode.wire import deadlines, limits
from swarmnode.wire.frames import Frame, FrameDecoder, encode_bytes
from swarmnode.wire.poll_signature import DIGEST_HEADER, KEY_HEADER, SIGNATURE_HEADER, TIME_HEADER
from swarmnode.wire.polled import BUNDLE_HEADER, BUNDLES_HEADER
from swarmnode.wire.table import BODY_LIMITS, DTYPE_BYTES, KINDS

DOC = (Path(__file__).parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")


def table(*columns: str) -> list[tuple[str, ...]]:
    """All rows of all tables that have these columns."""
    head = "| " + " | ".join(columns) + " |\n"
    rows = []
    for part in DOC.split(head)[1:]:
        for line in part.split("\n")[1:]:
            if not line.startswith("|"):
                break
            rows.append(tuple(cell.strip() for cell in line.strip("|").split("|")))
    return rows


def constants(module: Any) -> dict[str, str]:
    return {name: str(value) for name, value in vars(module).items() if name.isupper()}


def vectors() -> list[dict[str, str]]:
    blocks = re.findall(r"```vector\n(.*?)\n```", DOC, flags=re.DOTALL)
    return [dict(line.split(": ", 1) if ": " in line else (line[:-1], "") for line in b.split("\n")) for b in blocks]


def test_every_kind_and_key_is_in_the_document() -> None:
    expected = []
    for kind in KINDS.values():
        if not kind.keys:
            expected.append((kind.name, kind.body, "", "", ""))
        expected += [
            (kind.name, kind.body, key.name, "yes" if key.required else "no", key.type.text)
            for key in kind.keys.values()
        ]
    assert sorted(table("kind", "body", "key", "needed", "value")) == sorted(expected)


def test_limits_deadlines_bodies_and_dtypes_match() -> None:
    stated = {name: value for name, value, _ in table("constant", "value", "why")}
    assert stated == {**constants(limits), **constants(deadlines)}
    assert dict(table("body", "bytes at most")) == {rule: str(size) for rule, size in BODY_LIMITS.items()}
    assert dict(table("dtype", "bytes")) == {dtype: str(size) for dtype, size in DTYPE_BYTES.items()}


def test_the_headers_of_polled_requests_are_named() -> None:
    signed = {KEY_HEADER, TIME_HEADER, DIGEST_HEADER, SIGNATURE_HEADER}
    assert {name for name, _, _ in table("header", "on", "what")} == {BUNDLE_HEADER, BUNDLES_HEADER, *signed}


def test_every_limit_has_a_reason() -> None:
    unexplained = [name for name, _, why in table("constant", "value", "why") if name in vars(limits) and not why]
    assert unexplained == []


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: vector["kind"])
def test_golden_bytes(vector: dict[str, str]) -> None:
    frame = Frame(vector["kind"], json.loads(vector["header"]), bytes.fromhex(vector["body"]))
    assert encode_bytes(frame).hex() == vector["frame"]
    assert FrameDecoder().feed(bytes.fromhex(vector["frame"])) == [frame]


def test_there_are_vectors_for_every_group() -> None:
    groups = {KINDS[vector["kind"]].group for vector in vectors()}
    assert groups == {kind.group for kind in KINDS.values()}
