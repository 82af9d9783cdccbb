"""`top`: the swarm on the whole terminal, anew every second, until `q`."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnode.cli.client import DEFAULT_API, ApiClient, ApiOption, TokenOption
from swarmnode.cli.output import JsonFlag, console, print_json
from swarmnode.errors import SwarmError
from swarmnode.ui.top_view import BACK, DOWN, ENTER, TAB, UP, History, View, press

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import Console
    from rich.screen import Screen

NODES = "/api/v1/nodes?last_known=1"
SILENCE_S = 5.0
"""A coordinator that needs longer for its own list is in trouble; the screen says so instead of waiting."""
KEYS = {b"\x1b[A": UP, b"\x1bOA": UP, b"k": UP, b"\x1b[B": DOWN, b"\x1bOB": DOWN, b"j": DOWN}
KEYS |= {b"\r": ENTER, b"\n": ENTER, b"\x1b": BACK, b"\x7f": BACK, b"\x08": BACK, b"\t": TAB}
TOP_HELP = """Watch the swarm: nodes, rings with their stages and links, requests, events.

On a terminal: `q` leaves, `n` `r` `t` `e` open a section, Enter a row, Esc goes back, `s` sorts the requests. Elsewhere
it prints once.
"""


def register(app: typer.Typer) -> None:
    app.command("top", help=TOP_HELP)(top)


def top(
    every: Annotated[float, typer.Option("--every", min=0.2, max=60.0, help="Seconds between two looks.")] = 1.0,
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    json_output: JsonFlag = False,
) -> None:
    from swarmnode.ui.top import once

    client = ApiClient(api, token=token, silence_s=SILENCE_S)
    snapshot = client.get(NODES)
    screen = console()
    if json_output:
        print_json(snapshot)
    elif not screen.is_terminal or screen.is_dumb_terminal:
        screen.print(once(snapshot, now_unix_s=time.time()))
    else:
        _Top(screen, _Watch(client, snapshot, every)).run()


class _Watch:
    """The newest snapshot, asked for in a thread: a coordinator that does not answer must not make keys wait."""

    def __init__(self, client: ApiClient, first: Mapping[str, Any], every_s: float) -> None:
        self.snapshot = first
        self.history = History()
        self.notice = ""
        self._client = client
        self._every_s = every_s
        self._ended = threading.Event()
        self._note(first)

    @contextmanager
    def running(self, wake: int) -> Iterator[None]:
        """Ask until the block ends; a byte is written to `wake` whenever there is something new."""
        thread = threading.Thread(target=self._run, args=(wake,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()

    def _run(self, wake: int) -> None:
        seen_s = time.monotonic()
        while not self._ended.wait(self._every_s):
            try:
                self._note(self._client.get(NODES))
                self.notice, seen_s = "", time.monotonic()
            except SwarmError as error:
                self.notice = f"as of {time.monotonic() - seen_s:.0f} s ago: {error.message}"
            if not self._ended.is_set():
                os.write(wake, b".")

    def _note(self, snapshot: Mapping[str, Any]) -> None:
        self.history.note(snapshot, time.monotonic())
        self.snapshot = snapshot


class _Top:
    """Draws the watch's newest snapshot when there is one, and after every key."""

    def __init__(self, screen: Console, watch: _Watch) -> None:
        self._screen = screen
        self._watch = watch
        self._view: View | None = View()

    def run(self) -> None:
        """Until `q`, Ctrl-C or a signal; however it ends, the terminal is as it was."""
        from rich.screen import Screen

        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        with (
            _ended_by_signals(),
            _keys_as_they_come(),
            self._screen.screen(hide_cursor=True),
            self._watch.running(wake),
        ):
            while self._view is not None:
                self._draw(Screen)
                for source in self._wait(woken):
                    data = _read(source)
                    if source != woken:
                        self._view = self._pressed(data)

    def _wait(self, woken: int) -> list[int]:
        sources = [woken, *([sys.stdin.fileno()] if sys.stdin.isatty() else [])]
        return select.select(sources, [], [])[0]

    def _pressed(self, data: bytes) -> View | None:
        """Of an escape sequence that came in parts nothing is lost but that key."""
        view = self._view
        for key in _split(data):
            if view is not None:
                view = press(view, key, self._watch.snapshot)
        return view if data else None  # the terminal is gone

    def _draw(self, screen: type[Screen]) -> None:
        from swarmnode.ui.top import Size, render

        width, height = self._screen.size
        watch = self._watch
        drawn = render(
            watch.snapshot,
            Size(width, height),
            self._view,
            watch.history,
            now_unix_s=time.time(),
            notice=watch.notice,
        )
        self._screen.print(screen(drawn), end="")


def _read(source: int) -> bytes:
    """What is there; nothing where the terminal is gone."""
    try:
        return os.read(source, 1024)
    except OSError:
        return b""


def _split(data: bytes) -> Iterator[str]:
    """The keys of what was read at once."""
    while data:
        size = 3 if data[:2] in (b"\x1b[", b"\x1bO") else 1
        key, data = data[:size], data[size:]
        yield KEYS.get(key) or key.decode("ascii", "replace")


@contextmanager
def _keys_as_they_come() -> Iterator[None]:
    """Keys without Enter and without echo; Ctrl-C stays what it is."""
    if not sys.stdin.isatty():
        yield
        return
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    try:
        tty.setcbreak(stdin)
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and a lost terminal end it like `q`, so that the terminal is put back."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
