"""`swarmnode infer`: one question to a loaded model."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from swarmnode.cli.chat_stream import run_chat
from swarmnode.cli.client import DEFAULT_API, ApiClient, ApiOption, TokenOption
from swarmnode.cli.output import JsonFlag, console, print_json

INFER_HELP = """Ask a loaded model once; the reply streams to stdout, what it cost goes to stderr.

Examples:

    swarmnode infer smollm2-135m-instruct "Why is the sky blue?"

    swarmnode infer smollm2-135m-instruct "List three fruits" --temperature 0 --max-tokens 50 --json

    echo "Summarise: ..." | swarmnode infer smollm2-135m-instruct -
"""


def register(app: typer.Typer) -> None:
    app.command("infer", help=INFER_HELP)(infer)


def infer(
    model: Annotated[str, typer.Argument(help="The model's id.")],
    prompt: Annotated[str, typer.Argument(help="The question; - reads it from stdin.")],
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1)] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0, max=2)] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", min=0, max=1)] = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End the reply before this text.")] = None,
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    json_output: JsonFlag = False,
) -> None:
    text = sys.stdin.read() if prompt == "-" else prompt
    messages = [{"role": "system", "content": system}] if system is not None else []
    optional = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop}
    body: dict[str, Any] = {
        "model": model,
        "messages": [*messages, {"role": "user", "content": text}],
        **{name: value for name, value in optional.items() if value is not None and value != []},
    }
    client = ApiClient(api, token=token)
    if json_output:
        print_json(run_chat(client, body, lambda _: None).as_json())
        return
    result = run_chat(client, body, _write)
    print(flush=True)
    console(stderr=True).print(result.footer(), style="dim", markup=False, soft_wrap=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
