"""From a manifest, a load's options and the peers' offers to the specs of every stage."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from swarmnode.catalog.adapter import ADAPTER_FILE
from swarmnode.catalog.planning import check_codecs, cut_of_shards, stage_files
from swarmnode.catalog.safetensors_header import read_header
from swarmnode.cluster.machine_book import Weights
from swarmnode.cluster.measured import NOTHING_MEASURED
from swarmnode.cluster.placement import LacksKernels, Plan, PlanRequest, plan_load
from swarmnode.cluster.pricing import ModelShape
from swarmnode.cluster.quantization import NONE, as_served, default_quantization, degraded
from swarmnode.compute.spec import serving_dtype
from swarmnode.compute.supported import SCRIPTED, architecture_name, check_supported, quantization_obstacles
from swarmnode.errors import InvalidModel, LoadRefused
from swarmnode.roles.load_spec import LoadSpec
from swarmnode.wire.limits import MAX_PIECE_POSITIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from swarmnode.api.backend import LoadOptions
    from swarmnode.catalog.manifest import Manifest
    from swarmnode.catalog.registry import Registry
    from swarmnode.cluster.measured import Measured
    from swarmnode.cluster.placement import PeerResources
    from swarmnode.config import Settings
    from swarmnode.ids import RingId

CONFIG_PATH = "tokenizer/config.json"
MAX_CONFIG_BYTES = 4 << 20
"""The largest known config.json, with a vocabulary of extras in it, has a few hundred KiB."""
WAITING_BEYOND_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True)
class PlannedRing:
    plan: Plan
    specs: tuple[LoadSpec, ...]
    dtype: str
    quantization: str = NONE
    asked_quantization: str = NONE
    notice: str = ""
    """Why it serves with another quantization than was asked, or than the model records."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known beside the offers."""

    measured: Callable[[Weights], Measured] = lambda _: NOTHING_MEASURED
    """Of the peers, for steps over some weights."""
    obstacles: Mapping[str, str] = field(default_factory=dict)
    """By quantization, why it cannot be had of the model."""
    shard_boundaries: tuple[int, ...] | None = None
    """Where its shards are cut, if it records no split."""


NOTHING_KNOWN = Known()


def model_shape(manifest: Manifest) -> ModelShape:
    """The part of a manifest that placement computes with."""
    arch = manifest.architecture
    return ModelShape(
        layer_params=arch.layer_params,
        embed_params=arch.embed_params,
        head_params=arch.head_params,
        kv_values_per_token_layer=arch.kv_values_per_token_layer,
        context_tokens=arch.context_tokens,
        recorded_stages=manifest.num_stages,
        recorded_boundaries=manifest.boundaries,
        weightless=arch.name == SCRIPTED,
        tied=arch.tied,
        hidden_size=arch.hidden_size,
        vocab_size=arch.vocab_size,
        recurrent_layers=frozenset(arch.recurrent_layers),
        state_values_per_layer=arch.state_values_per_layer,
        adapter_params=arch.adapter_params,
        dora=arch.dora,
    )


@dataclass(frozen=True, slots=True)
class FilesHere:
    """Where a model's config lies on this machine, and by shard those of its files that name tensors. An adapter's are
    not among them: they may be in every shard."""

    config: Path
    shards: tuple[tuple[Path, ...], ...]


def files_here(registry: Registry, manifest: Manifest) -> FilesHere | None:
    """None where they are on other machines, which look when they load."""
    entry = next((entry for entry in manifest.files if entry.path == CONFIG_PATH), None)
    if entry is None or entry.size > MAX_CONFIG_BYTES:
        raise InvalidModel(f"{manifest.id} has no {CONFIG_PATH} of at most {MAX_CONFIG_BYTES} bytes; import it again")
    if manifest not in registry.here():
        return None
    shards = tuple(_headed(registry, manifest, shard) for shard in range(manifest.num_stages))
    return FilesHere(registry.file_path(manifest.id, entry), shards)


def examine(manifest: Manifest, files: FilesHere | None) -> Known:
    """What a model's config and its tensors' names say; raises LoadRefused where this version cannot serve it in stages
    at all. A large model's headers have hundreds of thousands of tensors: not for a loop that others wait for."""
    if files is None:
        return NOTHING_KNOWN
    try:
        config = json.loads(files.config.read_bytes())
    except ValueError as error:
        raise InvalidModel(f"{manifest.id}: {CONFIG_PATH} is not JSON ({error}); import it again") from error
    check_supported(config)
    if architecture_name(config) == SCRIPTED:
        return NOTHING_KNOWN
    name, found = architecture_name(config), quantization_obstacles(config, _tensors(files.shards[0]))
    told = {method: f"architecture {name!r} cannot be served with {method}: {why}" for method, why in found.items()}
    if manifest.boundaries is not None:
        return Known(obstacles=told)
    shards = [*map(_tensors, files.shards)]
    return Known(obstacles=told, shard_boundaries=cut_of_shards(manifest, shards) if all(shards) else None)


def _headed(registry: Registry, manifest: Manifest, shard: int) -> tuple[Path, ...]:
    """Of the model itself; those before the first that is damaged."""
    found: list[Path] = []
    paths = [file for file in manifest.shard_files(shard) if file.path.endswith(".safetensors")]
    with suppress(InvalidModel):
        for file in paths:
            if not file.path.endswith(f"/{ADAPTER_FILE}"):
                found += [registry.file_path(manifest.id, file)]
    return tuple(found)


def _tensors(shard: Sequence[Path]) -> Collection[str]:
    """The names in it; none where it is damaged here, which is no reason not to load: peers may have it whole."""
    found: set[str] = set()
    with suppress(InvalidModel):
        for path in shard:
            found |= read_header(path).keys()
    return found


def plan_ring(
    manifest: Manifest,
    options: LoadOptions,
    offers: Sequence[PeerResources],
    settings: Settings,
    ring: RingId,
    epoch: int,
    known: Known = NOTHING_KNOWN,
) -> PlannedRing:
    """Place the model; raises LoadRefused or PeerNotFound before anything is sent."""
    check_codecs(manifest)
    asked, cause = default_quantization(manifest.quantization)
    if options.quantization:
        asked, cause = options.quantization, ""
        _refuse_unquantizable(asked, known.obstacles)
    plan, request, notice = _place(manifest, options, Swarm(offers, known), settings, Wanted(asked, cause))
    layers = manifest.architecture.num_layers
    specs = tuple(
        LoadSpec(
            ring=ring,
            epoch=(epoch, 0),
            stage=index,
            nodes=tuple(held.peer.node for held in plan.stages),
            model=manifest.model_id,
            files=stage_files(manifest, stage.first_layer, stage.end_layer, len(plan.stages), index),
            scripted=manifest.architecture.name == SCRIPTED,
            dtype=request.dtype,
            quantization=request.quantization,
            eos_token_ids=manifest.eos_token_ids,
            num_stages=len(plan.stages),
            first_layer=stage.first_layer,
            end_layer=stage.end_layer,
            num_layers=layers,
            context_tokens=plan.context_tokens,
            min_context_tokens=settings.context_tokens,
            kv_tokens=plan.kv_tokens,
            max_in_flight=min(plan.max_in_flight, settings.max_in_flight or plan.max_in_flight),
            max_waiting=_waiting_room(plan, settings),
            max_group=settings.max_batch,
            prefill_chunk=settings.prefill_chunk,
            schedule=settings.schedule,
            typical_tokens=settings.typical_tokens,
            step_costs=settings.step_costs,
        )
        for index, stage in enumerate(plan.stages)
    )
    return PlannedRing(plan, specs, request.dtype, request.quantization, asked, notice)


def _refuse_unquantizable(asked: str, obstacles: Mapping[str, str]) -> None:
    """Raise LoadRefused where neither what a load asks for nor what would serve in its place can be had of the model:
    who asks for fewer bits is not given all of them instead."""
    if asked != NONE and all(method == NONE or method in obstacles for method in (asked, *degraded(asked))):
        raise LoadRefused(f"{obstacles[asked]}; load it without quantization", param="quantization")


@dataclass(frozen=True, slots=True)
class Swarm:
    """What there is to place on."""

    offers: Sequence[PeerResources]
    known: Known


@dataclass(frozen=True, slots=True)
class Wanted:
    """A quantization, and why it is another one than the model records."""

    method: str
    cause: str


def _place(
    manifest: Manifest, options: LoadOptions, swarm: Swarm, settings: Settings, wanted: Wanted
) -> tuple[Plan, PlanRequest, str]:
    """With the quantization that is wanted, else where it cannot be had of the model's blocks or too few peers have its
    kernels with the next best one (Q1, Q2)."""
    shape = replace(model_shape(manifest), shard_boundaries=swarm.known.shard_boundaries)
    lacking = wanted.cause and f"{wanted.cause}; "
    for method in (wanted.method, *degraded(wanted.method)):
        if method in swarm.known.obstacles:
            lacking += f"{swarm.known.obstacles[method]}; "
            continue
        request = PlanRequest(
            num_stages=options.num_stages,
            peers=options.peers,
            dtype=serving_dtype(options.dtype, manifest.dtype, method),
            in_flight=settings.in_flight,
            typical_tokens=settings.typical_tokens,
            min_context_tokens=settings.context_tokens,
            quantization=method,
            piece_tokens=min(settings.prefill_chunk or MAX_PIECE_POSITIONS, MAX_PIECE_POSITIONS),
            prefer=options.prefer,
        )
        try:
            measured = swarm.known.measured(Weights(manifest.model_id, request.dtype, method))
            offers = [replace(offer, kernels_failed=measured.failed.get(offer.node, "")) for offer in swarm.offers]
            plan = plan_load(shape, request, offers, measured)
        except LacksKernels as error:
            lacking += f"{error.message}; "
        except LoadRefused as error:
            if not lacking:
                raise
            raise type(error)(f"{lacking}and with {method}: {error.message}", param="quantization") from error
        else:
            return plan, request, f"{lacking}served {as_served(method)}" if lacking else ""
    raise AssertionError("full precision needs no kernels")


def _waiting_room(plan: Plan, settings: Settings) -> int:
    """How many requests may wait beside those in flight (R6: SWARM_SERVE_MAX_IN_FLIGHT counts both)."""
    if settings.max_in_flight is None:
        return WAITING_BEYOND_IN_FLIGHT
    return max(0, settings.max_in_flight - plan.max_in_flight)
