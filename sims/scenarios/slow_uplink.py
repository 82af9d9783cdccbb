"""A home uplink of a few Mbit/s: what prompts and chats get when the line, not a card, is the slowest server.

Two alike stages: a decode step of one row 60 ms, a piece of 256 positions 600 ms; 2.6 MB of hidden state a piece,
10 KiB a token.
"""

from __future__ import annotations

from typing import Any

from sims.engines import StageTable
from sims.report import gaps_ms, percentile, run_window
from sims.ring import RingSpec
from sims.scenarios.mixed import watch_pieces
from sims.world import Link, Request
from swarmnode.ring.head_messages import Sampled

UPLINKS_MBIT_S = (100.0, 20.0, 10.0, 5.0)
PROMPT_TOKENS = 1536
BYTES_PER_POSITION = 10240
LATENCY_S = 0.015
FOR_EVER = 1 << 30
STAGE = StageTable({1: 60.0, 8: 130.0}, {256: 600.0}, bytes_per_position=BYTES_PER_POSITION)


def run(seed: int = 0) -> dict[str, Any]:
    return {"rows": [_row(mbit_s, seed) for mbit_s in UPLINKS_MBIT_S]}


def _row(mbit_s: float, seed: int) -> dict[str, Any]:
    link = Link(LATENCY_S, bytes_per_s=mbit_s * 1e6 / 8)
    spec = RingSpec((STAGE, STAGE), (link, link), seed=seed)
    alone = spec.build()
    asked = alone.open(Request("prompt", (1,) * PROMPT_TOKENS, 1))
    begin_s = alone.now_s
    alone.run_until_quiet()
    ttft_s = asked.seconds_of(Sampled) - begin_s
    sizes = [256] * (PROMPT_TOKENS // 256)
    servers = [_servers_s(n, mbit_s) for n in sizes]
    floor_s = sum(servers[0]) + 2 * LATENCY_S + sum(max(server) for server in servers[1:])
    calm_ms, busy_ms, piece = _beside_a_prompt(spec)
    step_ms = percentile(calm_ms, 0.5)
    return {
        "uplink_mbit_s": mbit_s,
        "prompt_ttft_s": round(ttft_s, 2),
        "floor_s": round(floor_s, 2),
        "ratio": round(ttft_s / floor_s, 3),
        "chat_itl_p50_ms": round(step_ms, 1),
        "chat_itl_p99_ms_beside_a_prompt": round(percentile(busy_ms, 0.99), 1),
        "piece_positions": piece,
        "promised_itl_p99_ms": round(step_ms + STAGE.piece_ms(piece) + 100, 1),
    }


def _servers_s(n: int, mbit_s: float) -> list[float]:
    return [STAGE.piece_ms(n) / 1e3, n * BYTES_PER_POSITION * 8 / mbit_s / 1e6, STAGE.piece_ms(n) / 1e3]


def _beside_a_prompt(spec: RingSpec) -> tuple[list[float], list[float], int]:
    """A chat's gaps alone, then beside a prompt, and the largest piece of that."""
    world = spec.build()
    pieces = watch_pieces(world)
    chat = world.open(Request("chat", (1,), FOR_EVER))
    calm = run_window(world, 5.0, 20.0)
    world.open(Request("prompt", (1,) * PROMPT_TOKENS, 1))
    busy = run_window(world, 0.0, 10.0)
    return gaps_ms([chat], calm), gaps_ms([chat], busy), max(pieces)
