"""The coordinator's document: what is on disk after each change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kept_alone import state_at

if TYPE_CHECKING:
    from pathlib import Path


async def test_rings_that_are_kept_already_are_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "swarm.json"
    state = state_at(path)
    await state.keep_rings([{"ring": "r", "peers": ["attic", "cellar"]}])
    written, version = path.stat().st_ino, state.version  # every write puts a new file in its place
    await state.keep_rings([{"ring": "r", "peers": ["attic", "cellar"]}])
    again = state_at(path)
    await again.keep_rings([{"ring": "r", "peers": ["attic", "cellar"]}])
    assert (path.stat().st_ino, state.version, again.version) == (written, version, version)
    await state.keep_rings([])
    assert (state_at(path).rings, state_at(path).version) == ((), version + 1)
    await state.keep_rings([], [{"model": "m", "nodes": ["attic"]}])
    assert state_at(path).desired == ({"model": "m", "nodes": ["attic"]},)
