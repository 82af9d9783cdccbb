"""Distinct types for the identifiers that travel through the swarm."""

from __future__ import annotations

import re
from typing import NewType

NodeId = NewType("NodeId", str)
"""A machine, for as long as its data directory lives."""
BootId = NewType("BootId", str)
"""One run of a node's process; a restart gets a new one, so stale state cannot match."""
RingId = NewType("RingId", str)
"""One loaded placement of a model over stages."""
RequestId = NewType("RequestId", str)
"""One client request, as the gateway names it."""
SessionId = NewType("SessionId", int)
"""One conversation inside a ring; given by the head, never reused within a ring's life."""
ModelId = NewType("ModelId", str)
"""A servable's name: also a folder name, so only `parse_model_id` makes one from outside input."""

_MODEL_ID = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,94}[a-z0-9])?")
MODEL_ID_RULE = (
    "1 to 96 characters of a-z, 0-9, '.', '_' and '-', beginning and ending with a letter or digit, without '..'"
)
_NODE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
NODE_NAME_RULE = "1 to 64 characters of A-Z, a-z, 0-9, '.', '_' and '-', beginning and ending with a letter or digit"


def parse_model_id(text: str) -> ModelId:
    """Return `text` as a `ModelId`; raises ValueError that names the rule."""
    if not _MODEL_ID.fullmatch(text) or ".." in text:
        raise ValueError(f"model id {text[:120]!r} is not allowed: {MODEL_ID_RULE}")
    return ModelId(text)


def parse_node_name(text: str) -> str:
    """Return `text` if it may name a node; raises ValueError that names the rule."""
    if not _NODE_NAME.fullmatch(text):
        raise ValueError(f"node name {text[:120]!r} is not allowed: {NODE_NAME_RULE}")
    return text
