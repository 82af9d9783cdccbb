"""From a manifest, a load's options and the peers' offers to the specs of every stage."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnode.catalog.planning import check_codecs, stage_files
from swarmnode.cluster.machine_book import Weights
from swarmnode.cluster.measured import NOTHING_MEASURED
from swarmnode.cluster.placement import LacksKernels, Plan, PlanRequest, plan_load
from swarmnode.cluster.pricing import ModelShape
from swarmnode.cluster.quantization import NONE, default_quantization, degraded
from swarmnode.compute.spec import serving_dtype
from swarmnode.compute.supported import SCRIPTED, check_quantization, check_supported
from swarmnode.errors import InvalidModel, LoadRefused
from swarmnode.roles.load_spec import LoadSpec
from swarmnode.wire.limits import MAX_PIECE_POSITIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    """Why it serves with another quantization than was asked."""


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
    )


def check_architecture(registry: Registry, manifest: Manifest, options: LoadOptions) -> None:
    """Raise LoadRefused where this version cannot serve the model in stages, or not as quantized as is asked, by its
    config alone."""
    entry = next((entry for entry in manifest.files if entry.path == CONFIG_PATH), None)
    if entry is None or entry.size > MAX_CONFIG_BYTES:
        raise InvalidModel(f"{manifest.id} has no {CONFIG_PATH} of at most {MAX_CONFIG_BYTES} bytes; import it again")
    if manifest not in registry.here():
        return  # its files are on other machines, which look when they load
    try:
        config = json.loads(registry.file_path(manifest.id, entry).read_bytes())
    except ValueError as error:
        raise InvalidModel(f"{manifest.id}: {CONFIG_PATH} is not JSON ({error}); import it again") from error
    check_supported(config)
    check_quantization(config, _asked_quantization(manifest, options))


def plan_ring(
    manifest: Manifest,
    options: LoadOptions,
    offers: Sequence[PeerResources],
    settings: Settings,
    ring: RingId,
    epoch: int,
    measured: Callable[[Weights], Measured] = lambda _: NOTHING_MEASURED,
) -> PlannedRing:
    """Place the model; raises LoadRefused or PeerNotFound before anything is sent. `measured` says what is known of the
    peers for steps over some weights."""
    check_codecs(manifest)
    asked = _asked_quantization(manifest, options)
    plan, request, notice = _place(manifest, options, Swarm(offers, measured), settings, asked)
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


def _asked_quantization(manifest: Manifest, options: LoadOptions) -> str:
    return options.quantization or default_quantization(manifest.quantization)


@dataclass(frozen=True, slots=True)
class Swarm:
    """What there is to place on."""

    offers: Sequence[PeerResources]
    measured: Callable[[Weights], Measured]


def _place(
    manifest: Manifest, options: LoadOptions, swarm: Swarm, settings: Settings, asked: str
) -> tuple[Plan, PlanRequest, str]:
    """With the quantization that was asked, else where too few peers have its kernels with the next best one (Q1)."""
    lacking = ""
    for method in (asked, *degraded(asked)):
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
            measured = swarm.measured(Weights(manifest.model_id, request.dtype, method))
            plan = plan_load(model_shape(manifest), request, swarm.offers, measured)
        except LacksKernels as error:
            lacking += f"{error.message}; "
        except LoadRefused as error:
            if not lacking:
                raise
            raise LoadRefused(f"{lacking}and with {method}: {error.message}", param="quantization") from error
        else:
            return plan, request, f"{lacking}served with {method}" if lacking else ""
    raise AssertionError("full precision needs no kernels")


def _waiting_room(plan: Plan, settings: Settings) -> int:
    """How many requests may wait beside those in flight (R6: SWARM_SERVE_MAX_IN_FLIGHT counts both)."""
    if settings.max_in_flight is None:
        return WAITING_BEYOND_IN_FLIGHT
    return max(0, settings.max_in_flight - plan.max_in_flight)
