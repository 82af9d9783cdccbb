"""How many tokens of KV really fit beside a stage that has loaded (K3). No torch unless a card is asked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.available_memory import CARD_SHARE, offered_memory_bytes
from swarmnode.compute.kv_cache import GROWTH_TOKENS
from swarmnode.errors import LoadRefused

if TYPE_CHECKING:
    import torch

    from swarmnode.compute.kv_cache import SessionCache
    from swarmnode.compute.stage_model import StageModel

CARD_SPARE_BYTES = 300 << 20
"""Workspace of kernels on a card at least. In float32 there are none but torch's own, and what a forward takes by
arithmetic (one weight taken apart is in it) is all."""
CPU_SPARE_BYTES = 48 << 20
"""Of a worker on a CPU: frames, texts, the second copy of a buffer that grows, what the allocator keeps."""
GROWTH_SLACK = 9 / 8
"""Buffers grow by an eighth (see kv_cache.py), so so much of them is unused at worst."""
_FLOAT_BYTES = 4
_GROUP_ROWS = 8


@dataclass(frozen=True, slots=True)
class KvCost:
    """Bytes on one stage."""

    token: int
    """Keys and values of one position in all layers of the slice."""
    scores: int
    """What attention of one prompt piece needs for every position of its past."""
    session: int
    """What a running session and a parked one take however short they are: recurrent states, of which each keeps the
    one before its last forward, too."""
    workspace: int
    """What a piece, or a group of a few rows, takes besides while it runs."""
    float32: bool = False
    """Forwards compute in it."""


@dataclass(frozen=True, slots=True)
class KvRoom:
    """`tokens` that fit, and the numbers that say why."""

    tokens: int
    why: str


def kv_cost(model: StageModel, probed: SessionCache, piece: int) -> KvCost:
    """By the shapes of the slice and a session of one position on it; a forward takes at most `piece` positions."""
    token = probed.token_bytes()
    config: Any = model.config
    size, heads = model.dtype.itemsize, int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    hidden, inner = int(config.hidden_size), int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    if capped or model.device.type != "cpu":
        scores = piece * heads * _FLOAT_BYTES * (3 if capped else 1)
    else:  # the CPU kernel keeps no scores, but takes a mask, for each query head of a group where they are grouped
        scores = piece * size * (1 + heads // kv_heads)
    grouped = model.device.type != "cpu" and model.attention_mode != "sdpa"
    repeated = 0 if grouped else 2 * heads * head_dim * size  # torch's own way copies keys and values per head
    rows = piece * (4 * hidden + 3 * inner) * (size + _FLOAT_BYTES)
    logits = 2 * _GROUP_ROWS * int(config.vocab_size) * _FLOAT_BYTES if model.is_last else 0
    dequantized = 2 * hidden * inner * size
    session = probed.size_bytes() - GROWTH_TOKENS * token
    float32 = model.dtype.itemsize == _FLOAT_BYTES
    return KvCost(token, scores + repeated, 4 * session, rows + logits + dequantized, float32)


@dataclass(frozen=True, slots=True)
class Load:
    """How the sessions of a ring may use the stage: so many at once, none longer than `context_tokens`."""

    sessions: int
    context_tokens: int


def kv_room(cost: KvCost, device: torch.device, memory_bytes: int, load: Load) -> KvRoom:
    """What fits now, after loading: on a card of its free memory, on a CPU of `memory_bytes` (0: of what there is)."""
    if device.type == "cuda":
        return card_room(cost, _free_on_card(device), load)
    taken = resident_bytes()
    return cpu_room(cost, memory_bytes or taken + offered_memory_bytes(), taken, load)


def cpu_room(cost: KvCost, limit: int, taken: int, load: Load) -> KvRoom:
    """Of `limit` bytes, with `taken` after loading. Every session may hold a growth step that it does not use; one
    piece at a time is computed, against a past of at most one whole context."""
    steps = _growing_bytes(cost, load)
    room = limit - taken - cost.workspace - CPU_SPARE_BYTES - steps
    token = cost.token * GROWTH_SLACK
    tokens = room / (token + cost.scores)
    if tokens > load.context_tokens and token:
        tokens = (room - cost.scores * load.context_tokens) / token
    return KvRoom(
        max(0, int(tokens)),
        f"of {_mib(limit)} the loaded worker takes {_mib(taken)}, a prompt piece {_mib(cost.workspace)}, growing "
        f"sessions {_mib(steps)}, the rest {_mib(CPU_SPARE_BYTES)}; a token takes {_per_token(cost)}",
    )


def card_room(cost: KvCost, free: int, load: Load) -> KvRoom:
    """Of `free` bytes on a card, each token charged with its scores too: kernels there take workspace of their own."""
    spare = max(cost.workspace, 0 if cost.float32 else CARD_SPARE_BYTES)
    steps = _growing_bytes(cost, load)
    tokens = max(0, int((CARD_SHARE * free - spare - steps) / (cost.token + cost.scores)))
    return KvRoom(
        tokens,
        f"the card has {_mib(free)} free, of which {CARD_SHARE:.0%} less {_mib(spare)} for forwards and {_mib(steps)} "
        f"for growing sessions are used; a token takes {_per_token(cost)}",
    )


def _growing_bytes(cost: KvCost, load: Load) -> int:
    """Of every session, however short: growth steps that it does not use, and its recurrent states."""
    return load.sessions * (2 * GROWTH_TOKENS * cost.token + cost.session)


def admitted_tokens(planned: int, least: int, room: KvRoom) -> int:
    """The budget of the stage: never more than planned; raises LoadRefused where not even one conversation fits."""
    tokens = min(planned, room.tokens)
    if tokens < least:
        raise LoadRefused(
            f"too little memory for conversations: {room.tokens:,} tokens of KV fit, {planned:,} were planned, and one "
            f"conversation takes {least:,} ({room.why}). Use more stages, a smaller dtype, or raise --memory"
        )
    return tokens


def resident_bytes() -> int:
    """What this process takes now: pages in memory, files mapped into it included."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _free_on_card(device: torch.device) -> int:
    """What the driver has free, and what torch holds of the card without using it."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _per_token(cost: KvCost) -> str:
    return f"{cost.token:,} bytes of KV and {cost.scores:,} of scores"


def _mib(count: float) -> str:
    return f"{count / (1 << 20):,.0f} MiB"
