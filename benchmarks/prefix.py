"""What the second turn of a long conversation costs: its TTFT beside that of its new tokens alone (K5).

`python -m benchmarks.prefix --json`. Demo model, two stages. Each run is a conversation of its own that nobody had
before: a first turn of about `--tokens` tokens, then a second turn whose prompt is the first turn, its reply and a
question. Then a conversation is begun whose whole prompt has as many tokens as the second turn had new ones (by
`usage`, to a few tokens): the same work, had there been no past. Figures are medians over the runs, after one that is
thrown away.

    ratio = TTFT of the second turn / TTFT of its new tokens alone

It cannot be 1: the new tokens attend to all of the past. By arithmetic that adds 2 x past x heads x head_dim / (weights
of a layer) to their work: 0.5 for the demo model behind 1,600 positions (its layers are small: 3.5 M weights), 0.1 for
one with 2,048 numbers a position. `--hidden 2048` measures that: no ring, but one layer of that width with random
weights (`benchmarks/wide_layer.py`), behind `--tokens` positions and behind none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.users import PROMPTS, RingUnderTest, running_ring
from benchmarks.wide_layer import WIDTH_STEP, measure_layer
from swarmnode.cli.output import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.users import Ring
    from swarmnode.cli.chat_stream import ChatResult

REPLY_TOKENS = 24
QUESTION = (
    "Thank you, that was a pleasure to read. Now please tell me in your own words what the keeper saw from the tower "
    "on the last evening, what he did about it, and what the people of the village said when they heard of it."
)
NEW_TOKENS = 62
"""Of the second turn of the demo model: its question and what the template adds."""
FITTED_TOKENS = 2
"""The prompt that stands alone is lengthened word by word until it is this close to the new tokens."""


@dataclass(frozen=True, slots=True)
class Run:
    """One conversation; times in ms."""

    first_tokens: int
    first_ttft_ms: float
    second_tokens: int
    cached_tokens: int
    second_ttft_ms: float
    alone_tokens: int
    alone_ttft_ms: float

    @property
    def new_tokens(self) -> int:
        return self.second_tokens - self.cached_tokens


def measure(tokens: int, runs: int, about: RingUnderTest) -> dict[str, Any]:
    """Start the swarm, hold the conversations, and take it down."""
    with running_ring(about) as ring:
        done = [converse(ring, number, tokens) for number in range(runs + 1)][1:]
    return {"stages": about.stages, "dtype": about.dtype, "threads_per_stage": about.threads, **summary(done)}


def summary(done: Sequence[Run]) -> dict[str, Any]:
    """The runs, and the ratio of their medians."""
    second = statistics.median(run.second_ttft_ms for run in done)
    alone = statistics.median(run.alone_ttft_ms for run in done)
    return {
        "first_ttft_ms": round(statistics.median(run.first_ttft_ms for run in done), 1),
        "second_ttft_ms": round(second, 1),
        "alone_ttft_ms": round(alone, 1),
        "cached_tokens": round(statistics.median(run.cached_tokens for run in done)),
        "new_tokens": round(statistics.median(run.new_tokens for run in done)),
        "ratio": round(second / alone, 3),
        "runs": [asdict(run) for run in done],
    }


def converse(ring: Ring, number: int, tokens: int) -> Run:
    """One conversation, and its new tokens alone. Every system message begins with words of its own, so that nothing
    else in memory begins alike."""
    system = {"role": "system", "content": f"{number} times: answer briefly."}
    asked = {"role": "user", "content": f"Go on with this story. {story(number, tokens)}"}
    first = ring.chat([system, asked], REPLY_TOKENS)
    past = [system, asked, {"role": "assistant", "content": first.text}]
    second = ring.chat([*past, {"role": "user", "content": QUESTION}], REPLY_TOKENS)
    alone = _alone(ring, number, second.prompt_tokens - second.cached_tokens)
    return Run(
        first.prompt_tokens,
        round(first.ttft_s * 1e3, 1),
        second.prompt_tokens,
        second.cached_tokens,
        round(second.ttft_s * 1e3, 1),
        alone.prompt_tokens,
        round(alone.ttft_s * 1e3, 1),
    )


def story(number: int, tokens: int) -> str:
    """About so many tokens: a common word of English is one."""
    sentence = "On day {day} the keeper wrote a line about {what} and went up the stairs again to look at the sea. "
    parts: list[str] = []
    while sum(len(part.split()) for part in parts) * 1.15 < tokens:
        day = number * 1000 + len(parts)
        parts.append(sentence.format(day=day, what=PROMPTS[day % len(PROMPTS)]))
    return "".join(parts)


def _alone(ring: Ring, number: int, tokens: int) -> ChatResult:
    """A conversation's first turn of `tokens` tokens; tried until it fits, each time with other words at its start."""
    words = [*QUESTION.split(), *["again"] * tokens]
    count, tried = min(len(words), max(1, tokens - 20)), 0
    while True:
        system = {"role": "system", "content": f"{tried} and {number} times alone: answer."}
        found = ring.chat([system, {"role": "user", "content": " ".join(words[:count])}], REPLY_TOKENS)
        missing, tried = tokens - found.prompt_tokens, tried + 1
        if abs(missing) <= FITTED_TOKENS or tried > 5:
            return found
        count = min(len(words), max(1, count + missing))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="TTFT of a long conversation's second turn, by its new tokens alone.")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1500, help="of the first turn, about")
    parser.add_argument("--hidden", type=int, default=0, help="instead: one layer of this width, random weights")
    parser.add_argument("--runs", type=int, default=5, help="measured conversations, after one for warm-up")
    parser.add_argument("--rtt-ms", type=float, default=0.0, help="round trip between neighbours")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="per stage")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    chosen = parser.parse_args(arguments)
    if chosen.hidden % WIDTH_STEP:
        parser.error(f"--hidden {chosen.hidden} is no multiple of {WIDTH_STEP}")
    if chosen.hidden:
        wide = measure_layer(chosen.hidden, chosen.tokens, NEW_TOKENS, chosen.runs, chosen.dtype, chosen.threads)
        print(json.dumps(wide))
        return
    about = RingUnderTest(chosen.stages, chosen.rtt_ms, chosen.dtype, chosen.threads)
    report = measure(chosen.tokens, chosen.runs, about)
    _show(report)
    if chosen.json:
        print(json.dumps(report))


def _show(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['stages']} stages: second turn, and its new tokens alone")
    columns = ("first_ttft_ms", "cached_tokens", "new_tokens", "second_ttft_ms", "alone_ttft_ms", "ratio")
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row(*(str(report[name]) for name in columns))
    console().print(table)


if __name__ == "__main__":
    main()
