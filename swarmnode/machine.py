"""The contract of everything that decides: a machine takes messages and time, and returns effects as data."""

from __future__ import annotations

from typing import Protocol, TypeVar

In = TypeVar("In", contravariant=True)
Out = TypeVar("Out")
Event = TypeVar("Event")
T = TypeVar("T")


class Machine(Protocol[In, Out, Event]):
    """A state machine without I/O, clock or randomness: the same inputs give the same outputs.

    `now` is in seconds of one monotonic clock; with a message it may be the moment the message arrived, while the
    machine was kept busy until later. Effects are collected and drained by the caller: messages to send by
    `outgoing()`, things that happened by `events()`. A caller drains both after every input.
    """

    def receive(self, message: In, now: float) -> None:
        """Take one message."""

    def handle_timer(self, now: float) -> None:
        """Act on every deadline that is at or before `now`."""

    def next_timer(self) -> float | None:
        """The next deadline in seconds, or None while nothing is awaited."""

    def outgoing(self) -> list[Out]:
        """Messages to send, in order; a second call returns an empty list."""

    def events(self) -> list[Event]:
        """What happened, in order; a second call returns an empty list."""


def drain(collected: list[T]) -> list[T]:
    """What was collected so far, in order; the list is empty afterwards. Machines drain their effects with it."""
    drained = collected[:]
    collected.clear()
    return drained
