"""One stage's load as a coordinator would send it: what tests of a peer's parts share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmnode.ids import RingId
from swarmnode.roles.load_spec import LoadSpec

if TYPE_CHECKING:
    from swarmnode.catalog.manifest import FileEntry


def one_stage_load(files: tuple[FileEntry, ...], node: str) -> LoadSpec:
    """The whole of a scripted model of four layers on `node`."""
    numbers = {"num_stages": 1, "first_layer": 0, "end_layer": 4, "num_layers": 4, "max_group": 0}
    numbers |= {
        "context_tokens": 512,
        "min_context_tokens": 512,
        "kv_tokens": 4096,
        "typical_tokens": 64,
        "max_in_flight": 4,
        "max_waiting": 4,
        "prefill_chunk": 256,
    }
    body = {
        "model": "scripted",
        "files": [f.model_dump() for f in files],
        "scripted": True,
        "dtype": "float32",
        "quantization": "none",
        "schedule": "cost",
        "step_costs": False,
    }
    body |= {"eos_token_ids": [0], "sources": [], "nodes": [node], **numbers}
    return LoadSpec.read({"ring": RingId("r"), "epoch": [1, 0], "stage": 0}, body)
