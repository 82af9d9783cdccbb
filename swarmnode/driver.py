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
        self._flushing = False

    def feed(self, message: In) -> None:
        """Give the machine a message and carry out what it wants."""
        self._machine.receive(message, trio.current_time())
        self.flush()

    def flush(self) -> None:
        """Carry out all effects; those of a `feed` made by `send` or `notify` come behind the ones under way."""
        if self._flushing:
            return
        self._flushing = True
        try:
            while self._carry_out():
                pass
        finally:
            self._flushing = False
        self._fed.set()

    def _carry_out(self) -> bool:
        messages, events = self._machine.outgoing(), self._machine.events()
        for message in messages:
            self._send(message)
        for event in events:
            self._notify(event)
        return bool(messages or events)

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
