"""Long prompts among chats: what four users who are being answered feel while 2,000-token prompts come in.

Two alike stages (a decode step of one row 50 ms, of four 80 ms, a piece of 256 positions 1,200 ms), 20 ms between
them. The promise: a chat's token waits for one piece's compute on one stage, whatever comes in and however many stages.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from sims.engines import StageTable
from sims.report import Window, percentile
from sims.ring import RingSpec, links_of
from sims.world import Request, World
from swarmnode.ring.head_messages import Sampled
from swarmnode.ring.work import PieceWork

CHATS = 4
PROMPTS = 3
PROMPT_TOKENS = 2000
PROMPT_EVERY_S = 30.0
FIRST_PROMPT_S = 20.0
RTT_MS = 20.0
FOR_EVER = 1 << 30
STAGE = StageTable(
    {1: 50.0, 2: 60.0, 4: 80.0, 8: 130.0},
    {32: 190.0, 64: 330.0, 128: 620.0, 256: 1200.0},
    bytes_per_position=10240,
)


def run(seed: int = 0, jitter: float = 0.0) -> dict[str, Any]:
    """Both schedules; `step_ms` is the chats' p50 before the first prompt, `piece_ms` the largest piece sent while they
    chat, on one stage."""
    return {name: _run(name, seed, jitter) for name in ("cost", "source")}


def _run(schedule: str, seed: int, jitter: float) -> dict[str, Any]:
    return beside_prompts(RingSpec((STAGE, STAGE), links_of(2, RTT_MS), schedule=schedule, seed=seed, jitter=jitter))


def beside_prompts(spec: RingSpec, count: int = CHATS) -> dict[str, Any]:
    """What the chats of a ring get while one prompt after the other comes in."""
    world = spec.build()
    pieces = watch_pieces(world)
    chats = [world.open(Request(f"chat-{i}", (1,), FOR_EVER)) for i in range(count)]
    prompts = []
    for index in range(PROMPTS):
        at_s = FIRST_PROMPT_S + index * PROMPT_EVERY_S
        prompts.append((at_s, world.open(Request(f"prompt-{index}", (1,) * PROMPT_TOKENS, 20), at_s)))
    end_s = FIRST_PROMPT_S + PROMPTS * PROMPT_EVERY_S
    world.run_until(end_s)
    calm = _gaps_ms(chats, Window(FIRST_PROMPT_S / 2, FIRST_PROMPT_S, ()))
    busy = [gap for at_s, p in prompts for gap in _gaps_ms(chats, Window(at_s, _first_token_s(p, end_s), ()))]
    step_ms, piece_ms = percentile(calm, 0.5), max(table.piece_ms(max(pieces)) for table in spec.tables)
    return {
        "step_ms": round(step_ms, 1),
        "piece_positions": max(pieces),
        "piece_ms": round(piece_ms, 1),
        "chat_itl_p50_ms": round(percentile(busy, 0.5), 1),
        "chat_itl_p99_ms": round(percentile(busy, 0.99), 1),
        "promised_itl_p99_ms": round(step_ms + piece_ms + 100, 1),
        "prompt_ttft_s": [round(_first_token_s(p, end_s) - at_s, 2) for at_s, p in prompts],
    }


def watch_pieces(world: World) -> list[int]:
    """Sizes of the pieces that stage 0 runs while somebody chats."""
    seen = [1]
    engine, run_it = world.nodes[0].engine, world.nodes[0].engine.run

    def run(work: Any) -> Any:
        if isinstance(work, PieceWork):
            seen.append(len(work.ids))
        return run_it(work)

    engine.run = run  # type: ignore[method-assign]
    return seen


def _gaps_ms(chats: list[Any], window: Window) -> list[float]:
    pairs = (pair for chat in chats for pair in pairwise(chat.token_times_s))
    return [(b - a) * 1e3 for a, b in pairs if b > window.begin_s and a < window.end_s]


def _first_token_s(prompt: Any, otherwise_s: float) -> float:
    return next((at for at, event in prompt.events if isinstance(event, Sampled)), otherwise_s)
