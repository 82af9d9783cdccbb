"""The coordinator's document: what is on disk after each change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from kept_alone import state_at

from swarmnode.catalog.registry import Registry
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.roles.swarm_document import SwarmDocument, decode_document
from swarmnode.roles.swarm_state import MAX_REMOVED

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
        nursery.start_soon(state.drop_model, doomed, 5.0)
        await trio.testing.wait_all_tasks_blocked()
        await state.keep_models({kept.id: kept, doomed.id: doomed}, beside=True)
    again = state_at(tmp_path / "swarm.json")
    assert ({*again.models}, again.removed) == ({kept.id}, {doomed.digest: 5.0})


async def test_its_rings_go_with_it_and_the_last_removals_are_remembered(tmp_path: Path) -> None:
    write_scripted_servable(tmp_path / "models", "doomed", {"default": [1]}, layers=2, stages=1)
    (doomed,) = Registry(tmp_path / "models").here()
    before = doomed.model_copy(update={"import_id": "as another node has it"})
    state = state_at(tmp_path / "swarm.json")
    await state.keep_models({doomed.id: before})
    rings = [{"stages": [{"spec": {"model": model}}]} for model in ("doomed", "kept")]
    await state.keep_rings(rings, [{"model": "doomed"}, {"model": "kept"}])
    version = state.version
    await state.drop_model(doomed, 1.0)
    again = state_at(tmp_path / "swarm.json")
    assert (again.version, again.models, again.rings) == (version + 1, {}, (rings[1],)), "one change"
    assert (again.desired, {*again.removed}) == (({"model": "kept"},), {doomed.digest, before.digest})
    for number in range(MAX_REMOVED):
        await state.drop_model(doomed.model_copy(update={"import_id": str(number)}), 0.5)
    assert len(state.removed) == MAX_REMOVED
    assert doomed.digest not in state.removed, "the oldest go, whatever the clock says"


async def test_a_document_of_a_version_that_wrote_a_list_of_removals_is_read(tmp_path: Path) -> None:
    empty = json.loads(SwarmDocument().encode())
    assert decode_document(json.dumps(empty | {"removed": ["0" * 64]}).encode()).removed == {}
    with pytest.raises(ValueError, match="could not convert"):
        decode_document(json.dumps(empty | {"removed": {"0" * 64: "yesterday"}}).encode())
