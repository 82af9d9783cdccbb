"""What the coordinator tells a peer to load: the body of a `load` frame, as types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarmnode.catalog.manifest import FileEntry
from swarmnode.cluster.quantization import METHODS
from swarmnode.errors import ProtocolError
from swarmnode.ids import ModelId, NodeId, RingId, parse_model_id
from swarmnode.ring.head_config import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Mapping

_INTS = (
    "num_stages",
    "first_layer",
    "end_layer",
    "num_layers",
    "context_tokens",
    "min_context_tokens",
    "kv_tokens",
    "max_in_flight",
    "max_waiting",
    "max_group",
    "prefill_chunk",
    "typical_tokens",
)
MAX_SOURCES = 16
"""A connection to each; a home's link is full long before."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """One stage of one ring, with the files it needs; settings of the head matter on stage 0 only."""

    ring: RingId
    epoch: tuple[int, int]
    stage: int
    nodes: tuple[NodeId, ...]
    """Who holds each stage: nobody else's lanes are taken, and nobody else is dialled."""
    model: ModelId
    files: tuple[FileEntry, ...]
    scripted: bool
    dtype: str
    quantization: str
    eos_token_ids: tuple[int, ...]
    num_stages: int
    first_layer: int
    end_layer: int
    num_layers: int
    context_tokens: int
    min_context_tokens: int
    """A stage that cannot hold so many refuses the load."""
    kv_tokens: int
    max_in_flight: int
    max_waiting: int
    max_group: int
    prefill_chunk: int
    """Prompt positions a piece: what stage 0 sends, and what every stage needs room for."""
    schedule: str
    typical_tokens: int
    step_costs: bool
    """Every stage measures its step costs anew and logs them."""
    sources: tuple[tuple[NodeId, str], ...] = ()
    """Peers that may hold parts of the files, and where they are dialled."""

    def header(self) -> dict[str, Any]:
        return {"ring": self.ring, "epoch": list(self.epoch), "stage": self.stage}

    def body(self) -> dict[str, Any]:
        return {
            "nodes": list(self.nodes),
            "model": self.model,
            "files": [entry.model_dump() for entry in self.files],
            "scripted": self.scripted,
            "dtype": self.dtype,
            "schedule": self.schedule,
            "step_costs": self.step_costs,
            "quantization": self.quantization,
            "eos_token_ids": list(self.eos_token_ids),
            "sources": [list(source) for source in self.sources],
            **{name: getattr(self, name) for name in _INTS},
        }

    @classmethod
    def read(cls, header: Mapping[str, Any], body: Mapping[str, Any]) -> LoadSpec:
        """From a frame's header and unpacked body; raises ProtocolError that names what does not fit."""
        try:
            numbers = {name: _int(body, name) for name in _INTS}
            return cls(
                ring=RingId(header["ring"]),
                epoch=(header["epoch"][0], header["epoch"][1]),
                stage=header["stage"],
                nodes=_nodes(body, numbers["num_stages"]),
                model=parse_model_id(body["model"]),
                files=tuple(FileEntry.model_validate(entry) for entry in body["files"]),
                scripted=body["scripted"] is True,
                step_costs=body["step_costs"] is True,
                dtype=str(body["dtype"]),
                schedule=_schedule(body),
                quantization=_quantization(body),
                eos_token_ids=tuple(int(token) for token in body["eos_token_ids"]),
                sources=_sources(body["sources"]),
                **numbers,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the load does not fit: {error}") from error


def _nodes(body: Mapping[str, Any], num_stages: int) -> tuple[NodeId, ...]:
    nodes = body["nodes"]
    if not isinstance(nodes, list) or len(nodes) != num_stages or not all(isinstance(node, str) for node in nodes):
        raise ValueError(f"nodes is not a list of {num_stages} node ids")
    return tuple(NodeId(node) for node in nodes)


def _sources(pairs: list[tuple[str, str]]) -> tuple[tuple[NodeId, str], ...]:
    texts = isinstance(pairs, list) and all(isinstance(text, str) for pair in pairs for text in pair)
    if not texts or len(pairs) > MAX_SOURCES:
        raise ValueError(f"sources is not a list of up to {MAX_SOURCES} node ids and addresses")
    return tuple((NodeId(node), address) for node, address in pairs)


def _schedule(body: Mapping[str, Any]) -> str:
    schedule = body["schedule"]
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r:.80} is not one of {', '.join(SCHEDULES)}")
    return str(schedule)


def _quantization(body: Mapping[str, Any]) -> str:
    method = body["quantization"]
    if method not in METHODS:
        raise ValueError(f"quantization={method!r:.80} is not one of {', '.join(METHODS)}")
    return str(method)


def _int(body: Mapping[str, Any], name: str) -> int:
    value = body[name]
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise ValueError(f"{name}={value!r:.80} is not a whole number from 0 to 2^40")
    return value
