from __future__ import annotations

import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from stage_chains import Chain, even_cuts, onward

from swarmnode.catalog.manifest import MANIFEST_NAME, Manifest
from swarmnode.compute.byte_tokenizer import BYTE_EOS_ID
from swarmnode.compute.script import Script, contains, read_script
from swarmnode.compute.scripted import ScriptedEngine, load_scripted
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.compute.spec import StageSpec
from swarmnode.errors import CacheGap, InvalidModel, StageFailed
from swarmnode.ids import SessionId
from swarmnode.ring.work import Activation, Continuation, DecodeRow, GroupWork, PieceWork

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 6
A, B = SessionId(1), SessionId(2)
REPLIES = {
    "replies": [
        {"when": [7, 8], "ids": [70, 80]},
        {"when": [66], "ids": [1, 2, 3], "fail_at": 2},
        {"when": [67], "ids": [1, 2, 3], "fail_at": 1, "fail_layer": 0},
        {"when": [68], "ids": [1], "fail_at": 0},
    ],
    "default": [10, 11, 12],
    "eos": 2,
}


class Clock:
    """Collects what the engines wait for."""

    def __init__(self) -> None:
        self.slept_ms: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept_ms.append(round(seconds * 1000, 6))


def chain(stages: int, clock: Clock | None = None, **script: Any) -> Chain:
    cuts = even_cuts(LAYERS, stages)
    loaded = Script.model_validate(REPLIES | script)
    return Chain(
        [
            ScriptedEngine(
                loaded,
                StageSpec(None, (), begin, end, LAYERS, begin == 0, end == LAYERS),  # type: ignore[arg-type]
                (clock or Clock()).sleep,
            )
            for begin, end in pairwise(cuts)
        ]
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
@pytest.mark.parametrize("piece", [1, 2, 100])
def test_replies_by_prompt_then_eos(stages: int, piece: int) -> None:
    ring = chain(stages)
    assert ring.reply(1, [5, 7, 8, 9], 5, piece) == [70, 80, 2, 2, 2]
    assert ring.reply(1, [5, 7, 9, 8], 4, piece) == [10, 11, 12, 2]
    assert all(engine.kv_tokens() == 0 for engine in ring.engines)


def test_a_reply_can_repeat() -> None:
    assert chain(2, then="repeat").reply(1, [7, 8], 5, 9) == [70, 80, 70, 80, 70]
    assert chain(2, then="repeat", default=[]).reply(1, [1], 2, 9) == [2, 2]


def test_sessions_share_groups_and_gauges_follow() -> None:
    ring = chain(3)
    ring.prefill(1, [7, 8], 1)
    ring.prefill(2, [1, 2, 3], 2)
    assert ring.step(2, 1) == [11, 80]
    for engine in ring.engines:
        assert (engine.kv_tokens(), engine.kv_bytes()) == (3 + 4, 7 * 2 * 64)


def test_delays_per_token_per_group_and_per_row() -> None:
    clock = Clock()
    ring = chain(2, clock, prefill_ms_per_token=2, decode_ms=5, row_ms=0.5)
    ring.prefill(1, [1, 2, 3], 2)
    assert clock.slept_ms == [4, 4, 2, 2]
    ring.prefill(2, [1], 1)
    del clock.slept_ms[:]
    ring.step(1, 2)
    assert clock.slept_ms == [6, 6]


def test_a_forward_fails_where_the_script_says_and_again_when_retried() -> None:
    ring = chain(2)
    ring.prefill(1, [66], 1)
    ring.step(1)
    ring.prefill(2, [7, 8], 2)
    for _ in range(2):
        with pytest.raises(StageFailed, match="fails token 2"):
            ring.step(1, 2)
    with pytest.raises(StageFailed, match="fails token 2"):
        ring.step(1)
    assert ring.step(2) == [80]
    with pytest.raises(StageFailed, match="fails token 0"):
        ring.prefill(3, [68], 1)


def test_a_failure_can_be_on_an_earlier_stage() -> None:
    ring = chain(2)
    ring.prefill(1, [67], 1)
    with pytest.raises(StageFailed):
        ring.engines[0].run(GroupWork((DecodeRow(A, 1, 1),)))


def piece(engine: ScriptedEngine | Any, hidden: Activation | None = None) -> Any:
    return engine.run(PieceWork(A, 0, (5, 6), True, hidden))


def test_rows_that_went_astray_are_caught() -> None:
    ring = chain(3)
    first, middle, last = ring.engines
    after_first = piece(first).hidden
    after_middle = piece(middle, after_first).hidden
    with pytest.raises(StageFailed, match="rows went astray"):
        piece(last, after_first)
    with pytest.raises(StageFailed, match="rows went astray"):
        piece(middle, after_middle)
    with pytest.raises(StageFailed, match="went astray"):
        last.run(PieceWork(A, 0, (5, 9), True, after_middle))
    with pytest.raises(StageFailed, match="went astray"):
        last.run(PieceWork(A, 0, (5,), True, after_middle))
    damaged = bytearray(after_middle.data)
    damaged[3] ^= 1
    with pytest.raises(StageFailed, match="damaged"):
        piece(last, Activation("float32", (2, 8), damaged))
    with pytest.raises(StageFailed, match="without hidden states"):
        piece(last)
    with pytest.raises(StageFailed, match="63 bytes"):
        piece(last, Activation("float32", (2, 8), bytes(63)))


def test_a_row_of_another_session_is_caught_on_the_last_stage() -> None:
    ring = chain(2)
    ring.prefill(1, [7, 8], 2)
    ring.prefill(2, [1, 2], 2)
    swapped = GroupWork((DecodeRow(A, 2, 70), DecodeRow(B, 2, 10)))
    result = ring.engines[0].run(swapped)
    wrong = GroupWork((DecodeRow(B, 2), DecodeRow(A, 2)), result.hidden)
    with pytest.raises(StageFailed, match="went astray"):
        ring.engines[1].run(wrong)
    assert ring.engines[1].run(onward(swapped, result)).tokens == (80, 11)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("move", [True, False])
def test_a_parked_session_is_continued_on_every_stage(stages: int, move: bool) -> None:
    ring = chain(stages, replies=[{"when": [6, 10, 11, 9], "ids": [70]}])
    assert ring.park(1, [5, 6], 3, 2) == [10, 11, 12]
    start = Continuation(A, 4, move)
    assert ring.park(2, [5, 6, 10, 11, 9, 9], 2, 1, start=start) == [70, 2]
    assert [engine.kv_tokens() for engine in ring.engines] == [7 + (0 if move else 4)] * stages
    if not move:
        assert ring.park(3, [5, 6, 10, 4], 1, 1, start=Continuation(A, 3, move)) == [10]
    for engine in ring.engines:
        with pytest.raises(CacheGap, match="session 1 is not here with 5 positions"):
            engine.run(PieceWork(B, 5, (1,), True, start=Continuation(A, 5, move)))


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_session_that_was_paused_goes_on_behind_what_it_had_said(stages: int) -> None:
    ring = chain(stages)
    assert ring.reply(1, [5, 6], 2, 1) == [10, 11]
    ring.free(1)
    assert ring.reply(1, [5, 6, 10, 11], 2, 3) == [12, 2]
    ring.free(1)
    assert ring.reply(1, [5, 6, 10, 11, 12], 1, 2) == [2]
    assert ring.reply(2, [5, 6, 10, 11], 1, 2) == [10], "another session says what it says from the beginning"


def test_gaps_and_missing_tokens_raise() -> None:
    ring = chain(2)
    ring.prefill(1, [1, 2], 2)
    wrong = [
        (PieceWork(A, 3, (5,), True), "holds 2 positions, the work starts at position 3"),
        (PieceWork(B, 1, (5,), True), "holds 0 positions"),
        (GroupWork((DecodeRow(A, 3, 5),)), "position 3"),
        (GroupWork((DecodeRow(A, 2),)), "without a token"),
    ]
    for work, message in wrong:
        with pytest.raises(StageFailed, match=message):
            ring.engines[0].run(work)
    ring.engines[0].run(PieceWork(B, 0, (5,), last=False))
    with pytest.raises(StageFailed, match="before the prompt's last piece"):
        ring.engines[0].run(GroupWork((DecodeRow(B, 1, 5),)))


def test_a_servable_on_disk_is_whole(tmp_path: Path) -> None:
    folder = write_scripted_servable(tmp_path, "toy", {"default": [104, 105]}, layers=8, stages=3)
    manifest = Manifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    assert manifest.boundaries == (2, 5)
    assert manifest.eos_token_ids == (BYTE_EOS_ID,)
    for entry in manifest.files:
        assert (folder / entry.path).stat().st_size == entry.size
    assert all(manifest.shard_files(stage) for stage in range(3))
    files = tuple(folder / entry.path for entry in manifest.shard_files(1))
    engine = load_scripted(StageSpec(folder, files, 0, 8, 8, True, True))
    assert Chain([engine]).reply(1, [1, 2, 3], 3, 2) == [104, 105, BYTE_EOS_ID]


def test_stages_may_have_different_scripts_and_a_given_tokenizer(tmp_path: Path) -> None:
    source = write_scripted_servable(tmp_path, "one", {})
    scripts = [{"decode_ms": 1}, {"decode_ms": 30}]
    folder = write_scripted_servable(tmp_path, "two", scripts, tokenizer_dir=source / "tokenizer", context_tokens=99)
    delays = [read_script((folder / f"shards/stage-{i}/script.json",)).decode_ms for i in range(2)]
    assert delays == [1, 30]
    manifest = Manifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    assert manifest.architecture.context_tokens == 99
    assert {f.path for f in manifest.tokenizer_files()} == {
        "tokenizer/config.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    }
    with pytest.raises(ValueError, match="2 scripts for 3 stages"):
        write_scripted_servable(tmp_path, "three", scripts, stages=3)


def test_a_script_that_says_something_unknown_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('{"defualt": [1]}')
    with pytest.raises(InvalidModel, match="defualt"):
        read_script((path,))
    with pytest.raises(InvalidModel, match=r"no script\.json"):
        read_script(())


def test_contains() -> None:
    rows = [([1, 2, 3], [2, 3], True), ([1, 2, 3], [1, 3], False), ([1], [1, 2], False), ([], [], True)]
    assert [contains(ids, part) for ids, part, _ in rows] == [found for *_, found in rows]


def test_scripts_need_no_torch() -> None:
    import subprocess

    code = "import sys; sys.modules['torch'] = None; import swarmnode.compute.scripted_servable"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
