"""The coordinator's document: what is on disk after each change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmnode.roles.swarm_state import SwarmState

if TYPE_CHECKING:
    from pathlib import Path


async def test_rings_that_are_kept_already_are_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "swarm.json"
    state = SwarmState(path)
    await state.keep_rings([{"ring": "r", "peers": ["attic", "cellar"]}])
    written, version = path.stat().st_ino, state.version  # every write puts a new file in its place
    await state.keep_rings([{"ring": "r", "peers": ["attic", "cellar"]}])
    again = SwarmState(path)
    await again.keep_rings([{"ring": "r", "peers": ["attic", "cellar"]}])
    assert (path.stat().st_ino, state.version, again.version) == (written, version, version)
    await state.keep_rings([])
    assert (SwarmState(path).rings, SwarmState(path).version) == ((), version + 1)
