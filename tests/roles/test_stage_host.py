"""One stage around a real worker process: whatever goes wrong there is reported, and ends nothing else."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import trio
from contexts import node_context
from load_specs import one_stage_load

from swarmnode.catalog.registry import Registry
from swarmnode.catalog.store import ShardStore
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.config import read_settings
from swarmnode.errors import LoadFailed, OutOfMemory
from swarmnode.ids import BootId, NodeId
from swarmnode.roles import stage_host
from swarmnode.roles.context import PeerResources
from swarmnode.roles.file_server import serve_files
from swarmnode.roles.stage_host import StageHost
from swarmnode.wire.address import Address
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import Identity
from swarmnode.wire.memory import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from swarmnode.wire.link import Channel, Hello

HOUSE = Address("127.0.0.1", 1)
"""Where the coordinator answers, in tests that have one."""

PATIENCE_S = 30.0
SHORT_STALL_S = 0.5
HANGS_MS = 10_000_000


class HostedStage:
    """The only stage of a scripted model, and what it reports."""

    def __init__(
        self,
        folder: Path,
        script: dict[str, Any],
        *,
        fetched: bool = True,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        model = write_scripted_servable(folder / "servable", "scripted", script, layers=4, stages=1)
        manifest = Registry(model.parent).get("scripted")
        store = ShardStore(folder / "store")
        for entry in manifest.files if fetched else ():
            shutil.copyfile(model / entry.path, folder / "store" / "blobs" / entry.sha256)
        settings = read_settings(folder, environ=environ)
        identity = Identity(NodeId("n"), BootId("b"), "attic", listen=("127.0.0.1:1",))
        self.registry, self.network = Registry(model.parent), MemoryNetwork()
        context = node_context(identity, self.network, settings, [HOUSE])
        self.posted: list[list[str]] = []
        """Kinds of frames, by the call that posted them."""
        self._send, self._receive = trio.open_memory_channel[Frame](1000)
        resources = PeerResources(memory_bytes=1 << 30, device="cpu", threads=1)
        spec = replace(one_stage_load(manifest.files, "n"), model=manifest.model_id)
        self.host, self.again = (StageHost(context, spec, resources, store, self._post) for _ in range(2))

    def _post(self, *frames: Frame) -> None:
        self.posted.append([frame.kind for frame in frames])
        for frame in frames:
            self._send.send_nowait(frame)

    async def next_of(self, *kinds: str) -> Frame:
        with trio.fail_after(PATIENCE_S):
            while (frame := await self._receive.receive()).kind not in kinds:
                pass
        return frame


class StuckCoordinator:
    """Gives one frame of a file, and no more until it is told."""

    def __init__(self, stage: HostedStage) -> None:
        self.gave, self.may_go_on = trio.Event(), trio.Event()
        self._stage = stage

    async def listen(self, *, task_status: trio.TaskStatus[Address]) -> None:
        identity = Identity(NodeId("h"), BootId("h"), "house", listen=(str(HOUSE),))
        await self._stage.network.listen(HOUSE, self._serve, identity, task_status=task_status)

    async def _serve(self, kind: str, hello: Hello, channel: Channel) -> None:
        assert kind == "files"
        send = channel.send

        async def stuck(frame: Frame) -> None:
            if self.gave.is_set():
                await self.may_go_on.wait()
            await send(frame)
            self.gave.set()

        channel.send = stuck  # type: ignore[method-assign]
        await serve_files(self._stage.registry, channel)


async def test_a_worker_is_told_what_was_planned_whatever_its_own_machine_is_set_to(tmp_path: Path) -> None:
    """R6, B4, P1: the settings of a ring are its coordinator's."""
    names = ("PREFILL_CHUNK", "MAX_BATCH", "MAX_IN_FLIGHT", "TYPICAL_TOKENS", "CONTEXT_TOKENS")
    planned: dict[str, Any] = {
        "prefill_chunk": 64,
        "max_group": 3,
        "schedule": "source",
        "max_in_flight": 5,
        "max_waiting": 7,
        "typical_tokens": 99,
        "kv_tokens": 5000,
        "context_tokens": 4000,
        "min_context_tokens": 2000,
        "step_costs": True,
    }
    host = HostedStage(tmp_path, {}, environ={f"SWARM_SERVE_{name}": "1" for name in names}).host
    host.spec = replace(host.spec, **planned)
    told = host._worker_spec(tmp_path).as_map()
    assert {name: told[name] for name in planned} == planned
    assert told["memory_bytes"] == 1 << 30, "what its peer offers"


@pytest.mark.parametrize("end", [StageHost.unload, StageHost.coordinator_lost], ids=["unload", "coordinator lost"])
async def test_a_stage_that_fetches_ends_at_once_and_gives_its_files_free(
    tmp_path: Path, end: Callable[[StageHost], None]
) -> None:
    stage = HostedStage(tmp_path, {"default": list(b"hi")}, fetched=False)
    house = StuckCoordinator(stage)
    async with trio.open_nursery() as nursery:
        await nursery.start(house.listen)
        nursery.start_soon(stage.host.run)
        with trio.fail_after(PATIENCE_S):
            await house.gave.wait()
        assert (stage.host.phase, stage.host.worker) == ("fetching", None)
        end(stage.host)
        assert (await stage.next_of("unloaded", "stage_failed", "stage_ready")).kind == "unloaded"
        assert (stage.host.phase, stage.host.worker) == ("ended", None)
        house.may_go_on.set()
        nursery.start_soon(stage.again.run)
        await stage.next_of("stage_ready")
        stage.again.unload()
        await stage.next_of("unloaded")
        nursery.cancel_scope.cancel()


def chat() -> Frame:
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0}
    body = {"messages": [{"role": "user", "content": "hello"}], "sampling": sampling, "max_tokens": None, "stop": []}
    return Frame("open", {"request": "q", "ring": "r"}, pack_body(body))


async def test_a_worker_that_hangs_in_its_first_forward_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_host, "STALL_S", SHORT_STALL_S)
    stage = HostedStage(tmp_path, {"prefill_ms_per_token": HANGS_MS})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.host.run)
        await stage.next_of("stage_ready")
        stage.host.take(chat())
        await stage.next_of("accepted")
        failed = await stage.next_of("stage_failed")
        assert failed.header["code"] == "stage_lost"
        assert "SIGKILL" in failed.header["message"]
        await stage.next_of("unloaded")


async def test_what_a_worker_says_in_one_go_leaves_in_one_go(tmp_path: Path) -> None:
    stage = HostedStage(tmp_path, {"default": list(b"hi")})
    texts = [Frame("text", {"request": request, "text": "x", "n": 1}) for request in "abc"]
    stage.host._route_all([texts[0], Frame("stats", {}, pack_body({"running": 3})), *texts[1:]])
    assert stage.posted == [["gauges"], ["text"] * 3]
    with pytest.raises(LoadFailed, match="no memory"):
        stage.host._route_all([texts[0], Frame("fatal", {"code": "load_failed", "message": "no memory"})])
    assert stage.posted[2:] == [["text"]], "what came before the end is told"
    done = Frame("done", {"request": "b"}, pack_body({}))
    stage.host._route_all([done, Frame("broken", {}), texts[2]])
    assert stage.posted[3:] == [["done"], ["broken"], ["text"]], "what is over is told before its ring is"


async def test_a_worker_that_was_stopped_is_noticed_though_it_has_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_host, "PULSE_S", SHORT_STALL_S / 2)
    stage = HostedStage(tmp_path, {"default": list(b"hi")})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.host.run)
        await stage.next_of("stage_ready")
        assert stage.host.worker is not None
        os.kill(stage.host.worker.pid, signal.SIGSTOP)
        failed = await stage.next_of("stage_failed")
        assert "it had not answered for 0.75 s" in failed.header["message"]
        await stage.next_of("unloaded")


WARNING = "/x/_pytree.py:630: UserWarning: it is deprecated\n  warnings.warn(\n"


def worker_that_runs(folder: Path, code: str) -> str:
    """The path of an interpreter that runs `code`, in which `write` writes a line to stderr, whatever it is asked."""
    script = folder / "worker"
    said = "import os\nwrite = lambda text: os.write(2, text.encode() + b'\\n')\n"
    script.write_text(f"#!{sys.executable}\n{said}{code}")
    script.chmod(0o755)
    return str(script)


async def test_what_a_killed_worker_wrote_is_in_its_log_and_not_in_the_error(tmp_path: Path) -> None:
    stage = HostedStage(tmp_path, {"default": list(b"hi")})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.host.run)
        await stage.next_of("stage_ready")
        assert stage.host.worker is not None
        stage.host.worker.log.append("/x/_pytree.py:630: UserWarning: it is deprecated")
        os.kill(stage.host.worker.pid, signal.SIGKILL)
        failed = await stage.next_of("stage_failed")
        where = "GET /api/v1/workers/attic/logs has what it wrote"
        assert failed.header["message"] == f"stage 0's worker was ended by SIGKILL; {where}"
        await stage.next_of("unloaded")


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (
            f"write('ImportError: no torch'); write({WARNING!r}); os._exit(3)",
            "ended with exit code 3; its last words: ImportError: no torch; GET",
        ),
        (f"write({WARNING!r}); os._exit(3)", "ended with exit code 3; GET"),
        ("write('no memory'); os.kill(os.getpid(), 15)", "was ended by SIGTERM; GET"),
    ],
)
async def test_why_a_worker_did_not_load_is_its_last_line_that_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, how: str
) -> None:
    monkeypatch.setattr(sys, "executable", worker_that_runs(tmp_path, end))
    stage = HostedStage(tmp_path, {})
    await stage.host.run()
    failed = await stage.next_of("stage_failed")
    assert f"stage 0's worker {how}" in failed.header["message"]
    await stage.next_of("unloaded")


async def test_a_worker_that_the_kernel_kills_as_it_loads_is_told_as_a_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", worker_that_runs(tmp_path, "os.kill(os.getpid(), 9)"))
    stage = HostedStage(tmp_path, {})
    await stage.host.run()
    failed = await stage.next_of("stage_failed")
    assert failed.header["code"] == "out_of_memory"
    assert failed.header["message"].startswith("stage 0's worker was ended by SIGKILL; GET")
    assert failed.header["message"].endswith(OutOfMemory.advice)
    await stage.next_of("unloaded")


async def test_a_worker_that_computes_for_long_answers_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_host, "PULSE_S", SHORT_STALL_S / 2)
    stage = HostedStage(tmp_path, {"default": list(b"hi"), "prefill_ms_per_token": 250})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.host.run)
        await stage.next_of("stage_ready")
        stage.host.take(chat())
        assert (await stage.next_of("done", "stage_failed")).kind == "done"
        stage.host.unload()


async def test_a_worker_that_has_answered_may_be_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_host, "STALL_S", SHORT_STALL_S)
    stage = HostedStage(tmp_path, {"default": list(b"hi")})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.host.run)
        await stage.next_of("stage_ready")
        stage.host.take(chat())
        await stage.next_of("done")
        with trio.move_on_after(3 * SHORT_STALL_S):
            await stage.next_of("stage_failed")
            raise AssertionError("an idle worker was taken for a stuck one")
        stage.host.unload()
        await stage.next_of("unloaded")


async def test_a_head_that_gave_its_ring_up_has_the_coordinator_told(tmp_path: Path) -> None:
    stage = HostedStage(tmp_path, {})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.host.run)
        await stage.next_of("stage_ready")
        stage.host.take(Frame("broken", {"ring": "r", "stage": 0}))
        told = await stage.next_of("broken")
        assert "lost its neighbour" in told.header["message"]
        stage.host.take(chat())
        assert (await stage.next_of("error")).header["code"] == "stage_lost"
        stage.host.unload()


async def test_a_worker_that_cannot_be_started_fails_its_stage_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing-here"))
    stage = HostedStage(tmp_path, {})
    await stage.host.run()
    failed = await stage.next_of("stage_failed")
    assert failed.header["code"] == "load_failed"
    assert "cannot be started" in failed.header["message"]
    await stage.next_of("unloaded")


async def test_a_bug_around_a_stage_fails_that_stage_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(ShardStore, "place", broken)
    stage = HostedStage(tmp_path, {})
    await stage.host.run()
    assert (await stage.next_of("stage_failed")).header["code"] == "internal_error"
    await stage.next_of("unloaded")
