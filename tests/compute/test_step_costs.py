"""B6 at load: what is measured, within which time, and what the next load finds of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.compute.step_costs import (
    MAX_SIZES,
    Slice,
    allowance_s,
    cache_path,
    cached_costs,
    costs_as_map,
    keep_costs,
    measure,
    read_costs,
)
from swarmnode.errors import ProtocolError
from swarmnode.ring.cost_model import StageCosts
from swarmnode.ring.work import GroupWork, PieceWork, WorkResult
from swarmnode.wire.bodies import pack_body, unpack_body

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.ids import SessionId
    from swarmnode.ring.work import Work

FIRST = Slice(is_first=True, dtype="float32", hidden=8, longest_piece=256)
LATER = Slice(is_first=False, dtype="bfloat16", hidden=8, longest_piece=100)


@dataclass
class Metered:
    """An engine and the clock it moves: `row_ms` a position, `group_ms` a group on top."""

    group_ms: float = 10.0
    row_ms: float = 2.0
    now_s: float = 100.0
    lengths: dict[SessionId, int] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_s

    def run(self, work: Work) -> WorkResult:
        self.works.append(work)
        if isinstance(work, PieceWork):
            assert work.pos == 0
            self.lengths[work.session] = len(work.ids)
            self.now_s += self.row_ms * len(work.ids) / 1e3
        else:
            for row in work.rows:
                assert row.pos == self.lengths[row.session]
                self.lengths[row.session] += 1
            self.now_s += (self.group_ms + self.row_ms * len(work.rows)) / 1e3
        return WorkResult()

    def free(self, session: SessionId) -> None:
        del self.lengths[session]

    def kv_tokens(self) -> int:
        return sum(self.lengths.values())

    def kv_bytes(self) -> int:
        return self.kv_tokens()


def test_groups_and_two_pieces_are_measured_and_nothing_stays() -> None:
    engine = Metered()
    costs = measure(engine, FIRST, 60.0, engine.clock)
    assert costs.group_ms == pytest.approx({1: 12, 2: 14, 4: 18, 8: 26})
    assert costs.piece_ms == pytest.approx({32: 64, 256: 512})
    assert engine.kv_tokens() == 0
    assert all(work.hidden is None for work in engine.works)
    assert all(row.token == 0 for work in engine.works if isinstance(work, GroupWork) for row in work.rows)


def test_a_later_stage_gets_rows_of_its_dtype_and_pieces_no_longer_than_it_will_see() -> None:
    engine = Metered()
    assert list(measure(engine, LATER, 60.0, engine.clock).piece_ms) == [32, 100]
    for work in engine.works:
        rows = len(work.ids) if isinstance(work, PieceWork) else len(work.rows)
        assert work.hidden is not None
        assert (work.hidden.dtype, work.hidden.shape, len(work.hidden.data)) == ("bfloat16", (rows, 8), rows * 16)


@given(st.floats(0.01, 3000), st.floats(0.01, 3000), st.floats(0, 20))
def test_the_time_that_is_given_is_kept_to_beyond_the_first_step(
    group_ms: float, row_ms: float, given_s: float
) -> None:
    """A group of n rows costs at most n single ones: then no more is begun than what fits."""
    engine = Metered(group_ms, row_ms)
    begun_s = engine.now_s
    costs = measure(engine, FIRST, given_s, engine.clock)
    assert costs.group_ms
    assert engine.kv_tokens() == 0
    single_s = (group_ms + 2 * row_ms) / 1e3
    assert engine.now_s - begun_s <= max(given_s, single_s) * 1.001


def test_a_long_load_allows_more() -> None:
    assert [allowance_s(s) for s in (0.1, 40, 200)] == [2.0, 2.0, 10.0]


def test_a_failure_leaves_no_session_behind() -> None:
    class Failing(Metered):
        def run(self, work: Work) -> WorkResult:
            super().run(work)
            if len(self.works) > 5:
                raise RuntimeError("out of memory")
            return WorkResult()

    engine = Failing()
    with pytest.raises(RuntimeError):
        measure(engine, FIRST, 60.0, engine.clock)
    assert engine.kv_tokens() == 0


COSTS = StageCosts({1: 12.5, 2: 14.0}, {32: 64.25})
KEY: dict[str, str | int] = {"files": "tiny-0123", "device": "cpu", "threads": 2}


def test_costs_travel_in_a_frames_body() -> None:
    assert read_costs(unpack_body(pack_body(costs_as_map(COSTS)))) == COSTS


def test_the_next_load_finds_them_under_the_same_key_only(tmp_path: Path) -> None:
    path = cache_path(tmp_path, KEY)
    assert cached_costs(path, KEY) is None
    keep_costs(path, KEY, COSTS)
    assert cached_costs(path, KEY) == COSTS
    other = {**KEY, "threads": 1}
    assert cache_path(tmp_path, other) != path
    assert cached_costs(path, other) is None
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"key": {}}',
        '{"key": %s, "costs": {"group_ms": {"1": -1.0}, "piece_ms": {}}}',
        "[" * 9999,
    ],
)
def test_a_damaged_file_counts_as_none(text: str, tmp_path: Path) -> None:
    path = cache_path(tmp_path, KEY)
    path.write_text(text.replace("%s", json.dumps(KEY)))
    assert cached_costs(path, KEY) is None
    keep_costs(path, KEY, COSTS)
    assert cached_costs(path, KEY) == COSTS


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    keep_costs(cache_path(tmp_path / "missing", KEY), KEY, COSTS)


BAD: list[object] = [
    None,
    [],
    {"group_ms": {}},
    {"group_ms": [], "piece_ms": {}},
    {"group_ms": {"0": 1.0}, "piece_ms": {}},
    {"group_ms": {"-1": 1.0}, "piece_ms": {}},
    {"group_ms": {"x": 1.0}, "piece_ms": {}},
    {"group_ms": {"1": 0.0}, "piece_ms": {}},
    {"group_ms": {"1": float("nan")}, "piece_ms": {}},
    {"group_ms": {"1": float("inf")}, "piece_ms": {}},
    {"group_ms": {"1": "1"}, "piece_ms": {}},
    {"group_ms": {}, "piece_ms": {str(n): 1.0 for n in range(1, MAX_SIZES + 2)}},
]


@pytest.mark.parametrize("values", BAD, ids=str)
def test_what_no_stage_measures_is_refused(values: object) -> None:
    with pytest.raises(ProtocolError, match="step costs"):
        read_costs(values)
