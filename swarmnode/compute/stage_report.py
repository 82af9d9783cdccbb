"""What a loaded stage says of itself when it is ready: KV budget, step costs, the device and threads it uses."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode import __version__
from swarmnode.compute.freed_memory import return_freed_memory
from swarmnode.compute.kv_room import Load, admitted_tokens, kv_cost, kv_room
from swarmnode.compute.step_costs import (
    Slice,
    allowance_s,
    cache_path,
    cached_costs,
    costs_as_map,
    is_complete,
    keep_costs,
    measure,
)
from swarmnode.wire.limits import MAX_PIECE_POSITIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.compute.engine import TorchEngine
    from swarmnode.compute.scripted import ScriptedEngine
    from swarmnode.compute.worker_spec import WorkerSpec
    from swarmnode.ring.cost_model import StageCosts


@dataclass(frozen=True, slots=True)
class StageReport:
    """`costs` is None where nothing was measured, `kernels` where transformers' own blocks serve, unquantized."""

    kv_tokens: int
    kv_tokens_planned: int
    device: str
    threads: int
    costs: StageCosts | None
    kernels: str | None = None
    max_group: int = 0
    """Most rows of a decode group, while it is not known what they cost on every stage; 0: no cap."""

    def as_map(self) -> dict[str, Any]:
        """The part of the `ready` frame's body that is about the stage."""
        return {
            "kv_tokens": self.kv_tokens,
            "kv_tokens_planned": self.kv_tokens_planned,
            "device": self.device,
            "threads": self.threads,
            "kernels": self.kernels,
            "costs": None if self.costs is None else costs_as_map(self.costs),
            "max_group": self.max_group,
        }


def report_scripted(spec: WorkerSpec, engine: ScriptedEngine) -> StageReport:
    """A script takes no memory worth a word and says itself how long its steps take."""
    return StageReport(spec.kv_tokens, spec.kv_tokens, "script", 1, engine.costs())


def report_stage(
    spec: WorkerSpec, engine: TorchEngine, load_s: float, progress: Callable[[str, int, int], None]
) -> StageReport:
    """Measure the stage that took `load_s` to load; raises LoadRefused where no conversation fits beside it."""
    import torch

    from swarmnode.compute.device import unmeasured_rows

    progress("measuring", 0, 1)
    costs = _costs(spec, engine, load_s)
    return_freed_memory()  # of the steps that were measured: what the allocator keeps would be missing to conversations
    model = engine.model
    longest = piece_tokens(spec) or spec.context_tokens
    cost = kv_cost(model, engine.probe(), longest)
    room = kv_room(cost, model.device, spec.memory_bytes, Load(spec.max_in_flight, spec.context_tokens))
    tokens = admitted_tokens(spec.kv_tokens, min(spec.min_context_tokens, spec.context_tokens), room)
    if tokens < spec.kv_tokens:
        _log(spec, f"KV for {tokens:,} tokens fits, {spec.kv_tokens:,} were planned: {room.why}")
    most_rows, threads = unmeasured_rows(model.device), torch.get_num_threads()
    return StageReport(
        tokens, spec.kv_tokens, str(model.device), threads, costs, kernels=model.kernels(), max_group=most_rows
    )


def piece_tokens(spec: WorkerSpec) -> int:
    """Positions of a prompt piece: what was asked for, within what one frame to the next stage can hold (0: whole)."""
    if spec.num_stages == 1:
        return spec.prefill_chunk
    return min(spec.prefill_chunk or MAX_PIECE_POSITIONS, MAX_PIECE_POSITIONS)


def _costs(spec: WorkerSpec, engine: TorchEngine, load_s: float) -> StageCosts:
    """Those of an earlier load of the same slice on the same device, else measured now and kept."""
    folder, key = Path(spec.folder), _cost_key(spec, engine)
    path = cache_path(folder, key)
    costs = None if spec.step_costs else cached_costs(path, key)
    if costs is None:
        model = engine.model
        about = Slice(model.is_first, str(model.dtype).removeprefix("torch."), model.hidden_size, piece_tokens(spec))
        costs = measure(engine, about, allowance_s(load_s))
        if is_complete(costs, about.longest_piece):  # else the next load may find more time
            keep_costs(path, key, costs)
    if spec.step_costs:
        for name, table in costs_as_map(costs).items():
            _log(spec, f"{name}: " + ", ".join(f"{size}: {ms:.2f}" for size, ms in table.items()))
    return costs


def _cost_key(spec: WorkerSpec, engine: TorchEngine) -> dict[str, str | int]:
    """All that steps depend on. The folder's own name is a digest of the files in it."""
    import torch

    model = engine.model
    card = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
    return {
        "files": Path(spec.folder).name + ":" + ",".join(spec.shards),
        "first_layer": spec.first_layer,
        "end_layer": spec.end_layer,
        "device": card,
        "dtype": str(model.dtype),
        "quantization": spec.quantization,
        "longest_piece": piece_tokens(spec),
        "threads": torch.get_num_threads(),
        "lean": int(model.lean is not None),
        "kernels": model.kernels() or "",
        "version": f"{__version__}+torch{torch.__version__}",
    }


def _log(spec: WorkerSpec, text: str) -> None:
    print(f"[stage{spec.stage}] {text}", file=sys.stderr, flush=True)
