"""`model-remove` over real documents and folders: durable once it is answered, and never a file that somebody wants."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from contexts import node_context
from kept_alone import KeptAlone

from swarmnode.catalog.registry import Registry
from swarmnode.catalog.workspace import Workspace, sweep_removed
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.config import read_settings
from swarmnode.errors import Conflict, ModelNotFound, NotCoordinator
from swarmnode.ids import BootId, ModelId, NodeId, RingId
from swarmnode.roles import office
from swarmnode.roles.coordinator import Coordinator
from swarmnode.roles.gateway import Gateway
from swarmnode.roles.office import Office, write_catalogue
from swarmnode.roles.swarm_state import SwarmState
from swarmnode.wire.link import Identity
from swarmnode.wire.memory import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL = ModelId("doomed")
SECOND = "kept"


class Replica(KeptAlone):
    """What `before_write` raises is the majority's answer."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.before_write: Callable[[], object] = lambda: None

    async def write(self, document: bytes, expected: int, voters: tuple[NodeId, ...] | None = None) -> None:
        self.before_write()
        await super().write(document, expected, voters)


class Machine:
    """A node with its own models that coordinates a swarm of three seats; the document is on `folder`'s."""

    def __init__(self, folder: Path, name: str) -> None:
        self.root = folder / name / "models"
        self.replica = Replica(folder / "swarm.json")
        self.state = SwarmState(self.replica)
        self.registry = Registry(self.root, lambda: self.state.models, lambda: self.state.removed)
        settings = read_settings(folder / name, environ={})
        context = node_context(Identity(NodeId(name), BootId("b"), name), MemoryNetwork(), settings)
        self.coordinator = Coordinator(context, self.registry, cast("Any", None), self.state)
        self.gateway = Gateway(self.coordinator)

    def write(self, model: str = MODEL) -> None:
        """A new import."""
        shutil.rmtree(self.root / model, ignore_errors=True)
        write_scripted_servable(self.root, model, {"default": [1]}, layers=2, stages=1)

    async def served(self) -> list[str]:
        """What is in the catalogue after the next look at the disk, and in the document."""
        await write_catalogue(self.registry, self.state, {})
        listed = [manifest.id for manifest in self.registry.models()]
        assert listed == sorted(self.state.models)
        return listed

    def lies_here(self, model: str = MODEL) -> bool:
        return (self.root / model / "servable.json").exists()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path, "attic")
    machine.write()
    machine.write(SECOND)
    return machine


class PowerCut(Exception):
    pass


async def test_a_crash_before_the_files_are_deleted_brings_nothing_back(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(_: Workspace) -> None:
        raise PowerCut

    assert await machine.served() == [MODEL, SECOND]
    with monkeypatch.context() as patched:
        patched.setattr(Workspace, "remove", crash)
        with pytest.raises(PowerCut):
            await machine.gateway.remove(MODEL)
    again = Machine(tmp_path, "attic")
    assert (await again.served(), again.lies_here()) == ([SECOND], True)
    with pytest.raises(ModelNotFound, match=r"was removed from the swarm on 2\d{3}-\d\d-\d\d; delete .*attic"):
        again.gateway.model(MODEL)
    assert await again.gateway.remove(MODEL) == {"id": MODEL, "removed": True}
    assert not again.lies_here()
    with pytest.raises(ModelNotFound, match="is not served here"):
        await again.gateway.remove(MODEL)


async def test_while_an_import_runs_it_is_removed_all_the_same_and_the_answer_says_what_is_left(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    assert await machine.served() == [MODEL, SECOND]
    with Workspace(machine.root, MODEL).opened():
        with pytest.raises(Conflict, match=r"no longer served, but its files .*another import .*model-remove doomed"):
            await machine.gateway.remove(MODEL)
        assert await machine.served() == [SECOND], "the others are written down all the same"
        assert "doomed is not served: it was removed" in caplog.text
        machine.write("third")
        assert await machine.served() == [SECOND, "third"]
    await machine.gateway.remove(MODEL)
    assert not machine.lies_here()


class RunningRing:
    """What a removal sees of a ring."""

    model, ring, state, draining, runs = MODEL, RingId("r"), "ready", False, False
    life = SimpleNamespace(error=None)

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.unloaded_when: list[bool] = []
        machine.coordinator.rings.running[self.ring] = cast("Any", self)

    async def unload(self, *, force: bool) -> None:
        assert force
        self.unloaded_when.append(MODEL in self.machine.state.models)
        del self.machine.coordinator.rings.running[self.ring]


async def test_what_a_majority_refuses_changes_nothing(machine: Machine) -> None:
    assert await machine.served() == [MODEL, SECOND]
    ring = RunningRing(machine)
    with pytest.raises(Conflict, match=r"unload it first with `swarmnode model-unload doomed`, or .* with --force"):
        await machine.gateway.remove(MODEL)

    def refuse() -> None:
        with pytest.raises(ModelNotFound, match="is being removed"):
            machine.registry.get(MODEL)
        raise NotCoordinator("no majority answered")

    machine.replica.before_write = refuse
    with pytest.raises(NotCoordinator):
        await machine.gateway.remove(MODEL, force=True)
    machine.replica.before_write = lambda: None
    assert (await machine.served(), machine.lies_here(), ring.unloaded_when) == ([MODEL, SECOND], True, [])
    await machine.gateway.remove(MODEL, force=True)
    assert (await machine.served(), machine.lies_here(), ring.unloaded_when) == ([SECOND], False, [False])


async def test_a_ring_of_a_model_that_is_being_removed_is_not_written_down_anew(machine: Machine) -> None:
    """The fake has no record: asking it for one fails."""
    RunningRing(machine).runs = True
    with machine.registry.hidden(MODEL):
        await machine.coordinator.rings.keep()
    assert machine.state.rings == ()


async def test_a_copy_on_another_voter_stays_where_it_is_and_is_not_served(machine: Machine, tmp_path: Path) -> None:
    shutil.copytree(machine.root, tmp_path / "cellar" / "models")
    assert await machine.served() == [MODEL, SECOND]
    await machine.gateway.remove(MODEL)
    assert not machine.lies_here()
    cellar = Machine(tmp_path, "cellar")  # coordinates next
    assert (await cellar.served(), cellar.lies_here()) == ([SECOND], True)
    assert "removed from the swarm" in cellar.registry.problems()[MODEL]
    await cellar.gateway.remove(MODEL)
    assert not cellar.lies_here()


async def test_a_folder_that_is_copied_here_afterwards_is_never_deleted_unasked_and_a_new_import_is_served(
    machine: Machine, tmp_path: Path
) -> None:
    assert await machine.served() == [MODEL, SECOND]
    cellar = Machine(tmp_path, "cellar")
    await cellar.gateway.remove(MODEL)  # its files are in the attic
    shutil.copytree(machine.root / MODEL, cellar.root / MODEL)
    with pytest.raises(ModelNotFound, match="import it again"):
        cellar.gateway.model(MODEL)
    for _ in range(2):
        await write_catalogue(cellar.registry, cellar.state, {})
        assert ([*cellar.state.models], cellar.lies_here()) == ([], True)
    cellar.write()
    assert (await cellar.served(), cellar.registry.problems()) == ([MODEL], {})


async def test_an_import_that_is_published_meanwhile_stays_and_is_served(machine: Machine) -> None:
    assert await machine.served() == [MODEL, SECOND]
    machine.replica.before_write = machine.write
    assert await machine.gateway.remove(MODEL) == {"id": MODEL, "removed": True}
    machine.replica.before_write = lambda: None
    assert machine.lies_here()
    assert await machine.served() == [MODEL, SECOND]


async def test_an_office_finishes_the_removals_that_were_cut_off(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = trio.Event()

    def sweep(root: Path) -> None:
        sweep_removed(root)
        trio.from_thread.run_sync(swept.set)

    monkeypatch.setattr(office, "sweep_removed", sweep)
    left = machine.root / f".removed-{MODEL}"
    (machine.root / MODEL).rename(left)
    entry = SimpleNamespace(document=machine.replica.entry.document)
    voting = SimpleNamespace(coordinates=False, coordinator=None, removed=None, entry=entry, changed=trio.sleep_forever)
    settings = SimpleNamespace(models_root=machine.root)
    parts = SimpleNamespace(voting=voting, follow=None, context=SimpleNamespace(settings=settings))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Office(cast("Any", parts)).run)
        with trio.fail_after(10):
            await swept.wait()
        nursery.cancel_scope.cancel()
    assert (left.exists(), machine.lies_here(SECOND)) == (False, True)
