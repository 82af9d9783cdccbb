"""Keeps a node's `LocalHealth`: its loop is as late as a task on it that wants to run every second."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.cluster.local_health import LocalHealth


async def watch_loop(health: LocalHealth, told: Callable[[int], None] = lambda _: None) -> None:
    """Until cancelled. `told` gets the score after every tick and must not block."""
    while True:
        due_s = health.tick(trio.current_time())
        told(health.score)
        await trio.sleep_until(due_s)
