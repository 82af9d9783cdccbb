"""What a node tells its stage worker at start: the `init` frame's body, as types."""

from __future__ import annotations

from dataclasses import dataclass
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

    `memory_bytes` is what the node lets this worker take (0: no limit known). Head settings matter on stage 0 only.
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
    kv_tokens: int
    max_in_flight: int
    max_waiting: int
    prefill_chunk: int
    max_group: int
    schedule: str
    typical_tokens: int
    memory_bytes: int = 0

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
        try:
            known = {name: values[name] for name in cls.__slots__ if name in values}
            for name in ("shards", "eos_token_ids"):
                known[name] = tuple(known[name])
            return cls(**known)
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"the worker's settings do not fit: {error}") from error
