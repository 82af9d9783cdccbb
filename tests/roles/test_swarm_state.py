"""The coordinator's document: what is on disk after each change."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio
import trio.testing
from kept_alone import state_at

from swarmnode.catalog.registry import Registry
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.roles.office import finish_removals

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


async def test_a_model_that_is_dropped_stays_out_whatever_is_written_meanwhile(tmp_path: Path) -> None:
    """What keeps the catalogue, too, reads what is there and writes it back."""
    for model in ("doomed", "kept"):
        write_scripted_servable(tmp_path / "models", model, {"default": [1]}, layers=2, stages=1)
    state = state_at(tmp_path / "swarm.json")
    doomed, kept = Registry(tmp_path / "models").here()
    await state.keep_models({doomed.id: doomed})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(state.drop_model, doomed, elsewhere=True))
        await trio.testing.wait_all_tasks_blocked()
        await state.keep_models({kept.id: kept}, beside=True)
    again = state_at(tmp_path / "swarm.json")
    assert {*again.models} == {kept.id}
    assert (again.was_removed(doomed), again.was_removed(kept)) == (True, False), "its files are somewhere else"
    await finish_removals(Registry(tmp_path / "models"), again)
    assert [manifest.id for manifest in Registry(tmp_path / "models").here()] == [kept.id], "here they were"
    assert not state_at(tmp_path / "swarm.json").was_removed(doomed)
