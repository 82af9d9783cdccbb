"""`swarmnode bench`: what a running swarm gives its users, one, four and eight at a time."""

from __future__ import annotations

import itertools
import random
import secrets
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnode.cli.chat_stream import run_chat
from swarmnode.cli.client import DEFAULT_API, ApiClient, ApiOption, TokenOption
from swarmnode.cli.crowd import Crowd, summary
from swarmnode.cli.output import JsonFlag, console, print_json
from swarmnode.errors import InvalidRequest, ModelNotLoaded, Overloaded
from swarmnode.ui.quantities import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import RenderableType

MAX_USERS = 256
MAX_TOKENS = 1 << 20
WARM_UP_TOKENS = 16
"""Of each user's reply before a row is measured: enough for the ring to learn what groups of this size cost."""
FITS = 3
"""Requests that find out how many words make the asked number of tokens, from SOME_WORDS on."""
SOME_WORDS = 8
WORDS = ("light", "sea", "wind", "stone", "tower", "night", "boat", "lamp", "storm", "bread", "door", "road", "bird")
BENCH_HELP = """Measure a loaded model on your own swarm: TTFT, ITL, tokens/s, and where a token's time goes.

Every user asks for a story, reads it to its end and asks again. No two prompts begin alike, so that nothing is
continued from memory; with --repeat-prompt all are the same, and all but the first are.

Examples:

    swarmnode bench

    swarmnode bench smollm2-135m-instruct --users 1,2,16 --prompt-tokens 1000 --output-tokens 200

    swarmnode bench --users 8 --repeat-prompt --json
"""
METHOD = """\
Each row: so many users at once, each with a connection that is open and {requests}, one after the other; before it a \
reply of {warm_up} tokens for each of them, which does not count. Greedy. TTFT: from sending a request to its first \
text. ITL: between two pieces of text, which are tokens but for characters of several. TOK/S A USER: median over the \
replies, after their first token. IN ALL: tokens of all replies over the time from the first request to the last \
token, prompts included. Stages, link, queue: mean ms a token, as the swarm measured them. {prompts}"""


def register(app: typer.Typer) -> None:
    app.command("bench", help=BENCH_HELP)(bench)


def bench(
    model: Annotated[str | None, typer.Argument(help="The model's id. [the one that is loaded]")] = None,
    users: Annotated[str, typer.Option("--users", help="Users at once, a row each.")] = "1,4,8",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, max=MAX_TOKENS, help="Of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=2, max=MAX_TOKENS, help="Of each reply.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=1000, help="Requests of each user in a row.")] = 2,
    repeat_prompt: Annotated[bool, typer.Option("--repeat-prompt", help="The same prompt every time.")] = False,
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    json_output: JsonFlag = False,
) -> None:
    counts = parse_users(users)
    client = ApiClient(api, token=token)
    prompts = Prompts(model or _loaded_model(client), repeat=repeat_prompt)
    with _progress(len(counts), quiet=json_output) as show:
        show("finding how many words make a prompt")
        prompts.fit(client, prompt_tokens)
        rows = [
            _row(lambda: ApiClient(api, token=token), prompts, count, rounds, output_tokens, show) for count in counts
        ]
    report = {
        "model": prompts.model,
        "asked_prompt_tokens": prompt_tokens,
        "asked_output_tokens": output_tokens,
        "repeat_prompt": repeat_prompt,
        "method": _method(rounds, output_tokens, repeat=repeat_prompt),
        "rows": rows,
    }
    if json_output:
        print_json(report)
    else:
        screen = console()
        screen.print(_table(report))
        for line in _notes(report):
            screen.print(line, markup=False, soft_wrap=True)


def parse_users(text: str) -> list[int]:
    """`1,4,8`; raises InvalidRequest that says what is allowed."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and 0 < int(part[:9]) <= MAX_USERS for part in parts):
        raise InvalidRequest(
            f"--users {text[:80]!r}: write how many ask at once, separated by commas, each from 1 to {MAX_USERS}, "
            "like 1,4,8"
        )
    return [int(part) for part in parts]


def _loaded_model(client: ApiClient) -> str:
    ready = [str(model["id"]) for model in client.get("/api/v1/models")["models"] if model["state"] == "ready"]
    if not ready:
        raise ModelNotLoaded("no model is loaded; load one with `swarmnode model-load ID --wait`, then measure it")
    if len(ready) > 1:
        raise InvalidRequest(f"{len(ready)} models are loaded; say which: swarmnode bench {' | '.join(sorted(ready))}")
    return ready[0]


@dataclass(slots=True)
class Prompts:
    """Requests whose prompts are about as long as asked. Unless `repeat`, the first words of no two are alike."""

    model: str
    repeat: bool
    words: int = 0
    _run: str = field(default_factory=lambda: secrets.token_hex(3))
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def body(self, output_tokens: int) -> dict[str, Any]:
        key = f"{self._run} {0 if self.repeat else next(self._numbers)}"
        words = random.Random(key).choices(WORDS, k=self.words)
        text = f"{key}. Write a very long story about a lighthouse with many details. {' '.join(words)}"
        messages = [{"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": output_tokens}

    def fit(self, client: ApiClient, tokens: int) -> None:
        """Find how many words make `tokens` tokens with this model's tokenizer and template."""
        shortest = self._tokens(client)
        self.words = SOME_WORDS
        for _ in range(FITS):
            found = self._tokens(client) - shortest
            if abs(shortest + found - tokens) * self.words <= found:
                return  # a word more or less would be no closer
            self.words = max(0, round((tokens - shortest) * self.words / max(found, 1)))
            if not self.words:
                return

    def _tokens(self, client: ApiClient) -> int:
        return run_chat(client, self.body(1), lambda _: None).prompt_tokens


def _row(
    connect: Callable[[], ApiClient],
    prompts: Prompts,
    users: int,
    rounds: int,
    output_tokens: int,
    show: Callable[[str], None],
) -> dict[str, Any]:
    show(f"{plural(users, 'user')}: warming up")
    with _explained(users):
        Crowd(connect, lambda: [prompts.body(min(WARM_UP_TOKENS, output_tokens))], users).run()
    answered = itertools.count(1)
    total = users * rounds

    def tell() -> None:
        show(f"{plural(users, 'user')}: {next(answered)} of {plural(total, 'reply', 'replies')}")

    crowd = Crowd(connect, lambda: [prompts.body(output_tokens) for _ in range(rounds)], users, tell)
    took_s = crowd.run()
    return summary(users, crowd.replies, took_s)


@contextmanager
def _explained(users: int) -> Iterator[None]:
    try:
        yield
    except Overloaded as error:
        raise Overloaded(
            f"{users} users at once are more than this ring takes ({error.message}); measure fewer with --users, or "
            "load it with a larger SWARM_SERVE_IN_FLIGHT"
        ) from error


@contextmanager
def _progress(rows: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """One line that changes on a terminal; elsewhere a line for every row."""
    screen = console(stderr=True)
    if quiet:
        yield lambda _: None
    elif screen.is_terminal:
        with screen.status(f"{rows} rows") as status:
            yield status.update
    else:
        yield lambda text: None if " of " in text else screen.print(text, markup=False, soft_wrap=True)


def _table(report: Mapping[str, Any]) -> RenderableType:
    from swarmnode.ui.fitted_table import FittedTable

    rows: Sequence[Mapping[str, Any]] = report["rows"]
    stages = list(rows[0]["stage_ms"])
    table = FittedTable(
        *(">USERS", ">TTFT p50", ">p99 ms", ">ITL p50", ">p99 ms", ">TOK/S A USER", ">IN ALL"),
        *(f">{stage.upper()} ms?" for stage in stages),
        *(">LINK ms?", ">QUEUE ms?"),
    )
    for row in rows:
        spreads = [row[name][share] for name in ("ttft_ms", "itl_ms") for share in ("p50", "p99")]
        rates = [row["tokens_per_s_per_user"], row["tokens_per_s"]]
        times = [*(row["stage_ms"].get(stage, 0.0) for stage in stages), row["link_ms"], row["queue_ms"]]
        table.add_row(str(row["users"]), *(f"{value:,.1f}" for value in (*spreads, *rates, *times)))
    return table


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    first = report["rows"][0]
    yield f"{report['model']}: prompts of {first['prompt_tokens']:,} tokens, route {first['route'] or 'unknown'}"
    for row in report["rows"]:
        if row["output_tokens"] < report["asked_output_tokens"]:
            yield (
                f"{plural(row['users'], 'user')}: the model ended its replies after {row['output_tokens']:,} of "
                f"{report['asked_output_tokens']:,} tokens"
            )
        if row["cached_tokens"]:
            yield f"{plural(row['users'], 'user')}: {row['cached_tokens']:,} tokens of a prompt came from memory"
    yield report["method"]


def _method(rounds: int, output_tokens: int, *, repeat: bool) -> str:
    distinct = (
        "No two prompts begin alike, so none is continued from memory beyond what the model's template begins with."
    )
    same = "All prompts are the same (--repeat-prompt), so most of each is continued from memory."
    return METHOD.format(
        requests=plural(rounds, "request"),
        warm_up=min(WARM_UP_TOKENS, output_tokens),
        prompts=same if repeat else distinct,
    )
