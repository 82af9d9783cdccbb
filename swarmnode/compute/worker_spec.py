"""What a node tells its stage worker at start: the `init` frame's body, as types."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.compute.spec import StageSpec
from swarmnode.errors import ProtocolError
from swarmnode.ids import RingId

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One stage of one ring. `folder` holds tokenizer/ and shards/; `shards` are paths below it.

    `kv_tokens` is what the plan gives the sessions together; the stage refuses the load where not even
    `min_context_tokens` fit. `memory_bytes` is what the node lets this worker take (0: no limit known). `step_costs`:
    measure them anew and log them. Head settings matter on stage 0 only.
    """

    ring: str
    epoch: int
    stage: int
    num_stages: int
    folder: str
    shards: tuple[str, ...]
    first_layer: int
    end_layer: int
    num_layers: int
    scripted: bool
    dtype: str
    quantization: str
    device: str
    threads: int
    eos_token_ids: tuple[int, ...]
    context_tokens: int
    min_context_tokens: int
    kv_tokens: int
    max_in_flight: int
    max_waiting: int
    prefill_chunk: int
    max_group: int
    schedule: str
    typical_tokens: int
    memory_bytes: int = 0
    step_costs: bool = False

    @property
    def ring_id(self) -> RingId:
        return RingId(self.ring)

    def stage_spec(self) -> StageSpec:
        """The part of it that loading needs."""
        folder = Path(self.folder)
        return StageSpec(
            folder=folder,
            files=tuple(folder / shard for shard in self.shards),
            first_layer=self.first_layer,
            end_layer=self.end_layer,
            num_layers=self.num_layers,
            is_first=self.stage == 0,
            is_last=self.stage == self.num_stages - 1,
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            quantization=self.quantization,
        )

    def as_map(self) -> dict[str, Any]:
        """For `pack_body`; tuples travel as lists."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_map(cls, values: Mapping[str, Any]) -> WorkerSpec:
        """Read what a node sent; raises ProtocolError that names a missing or mistyped setting."""
        known = {f.name: _read(f.name, str(f.type), values[f.name]) for f in fields(cls) if f.name in values}
        try:
            return cls(**known)
        except TypeError as error:
            raise ProtocolError(f"the worker's settings do not fit: {error}") from error


_PLAIN = {"str": str, "int": int, "bool": bool}


def _read(name: str, kind: str, value: Any) -> Any:
    """`value` as a field of type `kind` holds it; kinds are plain, or tuples of one plain kind."""
    if kind in _PLAIN:
        fits = type(value) is _PLAIN[kind]
    else:
        item = _PLAIN[kind.removeprefix("tuple[").removesuffix(", ...]")]
        fits = isinstance(value, list | tuple) and all(type(entry) is item for entry in value)
    if not fits:
        raise ProtocolError(f"the worker's setting {name}={value!r:.80} is not of type {kind}")
    return value if kind in _PLAIN else tuple(value)
