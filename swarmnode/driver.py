"""Joins one machine (`machine.py`) to trio: deliver, flush, and keep one timer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.machine import Machine

In = TypeVar("In")
Out = TypeVar("Out")
Event = TypeVar("Event")


class Driver(Generic[In, Out, Event]):
    """Feeds a machine and carries out its effects. `send` and `notify` are called in order and must not block."""

    def __init__(
        self, machine: Machine[In, Out, Event], send: Callable[[Out], None], notify: Callable[[Event], None]
    ) -> None:
        self._machine = machine
        self._send = send
        self._notify = notify
        self._fed = trio.Event()

    def feed(self, message: In) -> None:
        """Give the machine a message and carry out what it wants."""
        self._machine.receive(message, trio.current_time())
        self.flush()

    def flush(self) -> None:
        for message in self._machine.outgoing():
            self._send(message)
        for event in self._machine.events():
            self._notify(event)
        self._fed.set()

    async def run(self) -> None:
        """The machine's timer; ends only by cancellation."""
        self.flush()
        while True:
            self._fed = trio.Event()
            deadline = self._machine.next_timer()
            with trio.move_on_at(math.inf if deadline is None else deadline):
                await self._fed.wait()
            now = trio.current_time()
            if deadline is not None and now >= deadline:
                self._machine.handle_timer(now)
                self.flush()
