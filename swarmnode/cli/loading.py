"""Starting a load and following it to its end."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from swarmnode.cli.client import model_path
from swarmnode.errors import LoadFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import Console

    from swarmnode.cli.client import ApiClient

POLL_S = 0.2


def follow_load(
    client: ApiClient, model: str, options: Mapping[str, Any], show: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Load and give every status to `show` until the model is ready; returns the last one. Raises LoadFailed."""
    status = client.post(model_path(model, "load"), options)
    while status["state"] == "loading":
        show(status)
        time.sleep(POLL_S)
        status = client.get(model_path(model, "status"))
    show(status)
    if status["state"] != "ready":
        error = (status.get("error") or {}).get("message") or f"it is {status['state']}"
        why = (status.get("restoring") or {}).get("waits_for") or error
        raise LoadFailed(f"{model} did not load: {why}")
    return status


@contextmanager
def load_display(screen: Console) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Bars on a terminal; elsewhere a line for every change."""
    from rich.live import Live

    from swarmnode.ui.load_progress import load_lines, load_view

    if screen.is_terminal:
        with Live(console=screen, transient=True, refresh_per_second=8) as live:
            yield lambda status: live.update(load_view(status))
        return
    shown: set[str] = set()

    def show(status: Mapping[str, Any]) -> None:
        for line in load_lines(status):
            if line not in shown:
                shown.add(line)
                screen.print(line, markup=False, soft_wrap=True)

    yield show
