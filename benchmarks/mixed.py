"""A prompt of 2,000 tokens arriving among four chats: what the chats feel of it.

`python -m benchmarks.mixed --json`. A real ring of the demo model. Four chats are being answered; after a calm while a
prompt of `--tokens` tokens comes in, and the chats' inter-token latencies until its first token are set beside the
calm ones of the same run. Then pieces of every size run on the same slices behind `--tokens` positions, in processes
of their own, all stages at once: the largest that the schedule may send while somebody chats is the piece of the aim.

    aim    ITL p99 beside the prompt ≤ one calm step (p50) + one piece's compute on the slowest stage + 100 ms
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.prefix import story
from benchmarks.stage_times import StageTimers
from benchmarks.users import RingUnderTest, running_ring
from sims.report import percentile
from swarmnode.cli.output import console
from swarmnode.ring.cost_schedule import PIECE_MS, PIECE_SIZES, PIECE_STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.users import Ring
    from swarmnode.cli.chat_stream import ChatResult

CHATS = 4
SLACK_MS = 100.0
CALM_TOKENS = 24
"""Of every chat before the prompt comes."""


def measure(tokens: int, reply_tokens: int, runs: int, about: RingUnderTest) -> dict[str, Any]:
    """`runs` prompts, each among four new chats, after one that is thrown away."""
    with running_ring(about) as ring:
        ring.run(CHATS, CALM_TOKENS)
        seen = [_one(ring, tokens, reply_tokens) for _ in range(runs + 1)][1:]
        calm = [gap for one in seen for gap in one["calm_ms"]]
        busy = [gap for one in seen for gap in one["busy_ms"]]
        step_ms = percentile(calm, 0.5)
        with StageTimers(ring.model, ring.status, about.dtype, about.threads) as timers:
            pieces = {n: [ms for (ms,) in timers.pieces_ms([n], tokens - n)] for n in PIECE_SIZES}
    size = largest_bearable(pieces, step_ms)
    aim_ms = step_ms + max(pieces[size]) + SLACK_MS
    p99 = percentile(busy, 0.99)
    return {
        "stages": about.stages,
        "rtt_ms": about.rtt_ms,
        "dtype": about.dtype,
        "prompt_tokens": seen[0]["prompt_tokens"],
        "prompt_ttft_ms": round(percentile([one["ttft_ms"] for one in seen], 0.5), 1),
        "calm_itl_p50_ms": round(step_ms, 1),
        "calm_itl_p99_ms": round(percentile(calm, 0.99), 1),
        "itl_p50_ms": round(percentile(busy, 0.5), 1),
        "itl_p99_ms": round(p99, 1),
        "piece_positions": size,
        "piece_ms": [round(ms, 1) for ms in pieces[size]],
        "aim_p99_ms": round(aim_ms, 1),
        "met": p99 <= aim_ms,
        "gaps": len(busy),
    }


def largest_bearable(pieces: dict[int, list[float]], step_ms: float) -> int:
    """The schedule's rule over these stages' times: no piece costs a stage more than PIECE_MS, or PIECE_STEPS steps."""
    stages = len(next(iter(pieces.values())))
    limit_ms = max(PIECE_MS, PIECE_STEPS * step_ms / stages)
    return max((n for n, times in pieces.items() if max(times) <= limit_ms), default=min(pieces))


def _one(ring: Ring, tokens: int, reply_tokens: int) -> dict[str, Any]:
    """Gaps of the chats before the prompt came and until its first token."""
    crowd = ring.crowd(CHATS)
    chats = threading.Thread(target=ring.answer, args=(crowd, reply_tokens))
    chats.start()
    while chats.is_alive() and min(len(times) for times in crowd.times_s) < CALM_TOKENS:
        time.sleep(0.01)
    content = f"{ring.mark()} {story(0, tokens)}"
    asked_s = time.monotonic()
    prompt: ChatResult = ring.chat([{"role": "user", "content": content}], 1)
    first_s = asked_s + prompt.ttft_s
    chats.join()
    if min(times[-1] for times in crowd.times_s) < first_s:
        raise RuntimeError(f"the chats ended before the prompt was read; raise --reply-tokens from {reply_tokens}")
    gaps = [gap for times in crowd.times_s for gap in pairwise(times)]
    calm_s = max(times[0] for times in crowd.times_s)
    return {
        "prompt_tokens": prompt.prompt_tokens,
        "ttft_ms": prompt.ttft_s * 1e3,
        "calm_ms": [(b - a) * 1e3 for a, b in gaps if a >= calm_s and b <= asked_s],
        "busy_ms": [(b - a) * 1e3 for a, b in gaps if b > asked_s and a < first_s],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What four chats feel of a long prompt that comes in.")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt, about")
    parser.add_argument("--reply-tokens", type=int, default=256, help="of each chat: enough to outlast the prompt")
    parser.add_argument("--runs", type=int, default=3, help="prompts, after one for warm-up")
    parser.add_argument("--rtt-ms", type=float, default=20.0, help="round trip between neighbours")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="per stage")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    chosen = parser.parse_args(arguments)
    about = RingUnderTest(chosen.stages, chosen.rtt_ms, chosen.dtype, chosen.threads)
    report = measure(chosen.tokens, chosen.reply_tokens, chosen.runs, about)
    table = Table("", "", title="A prompt among four chats", show_header=False)
    for name, value in report.items():
        table.add_row(name.replace("_", " "), str(value))
    console().print(table)
    if chosen.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
