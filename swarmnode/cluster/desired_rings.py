"""Rings that are to be there: when one that was lost is loaded again.

At once where that is possible, else when a peer comes, after each failure later than before; never given up, until
somebody lets the model go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnode.machine import drain

if TYPE_CHECKING:
    from swarmnode.ids import ModelId

RETRY_S = 5.0
"""After the first failure; the next ones wait twice as long each."""
RETRY_MOST_S = 300.0
STEADY_S = 60.0
"""A ring that ran for this long came up for good: what happens to it then is no repetition."""
LOOK_AGAIN_S = 30.0
"""Without a place for it: what peers offer and what the catalogue holds changes without anybody coming."""
RETURN_S = 10.0
"""After a coordinator's return, for the peers that held it to find it; the slowest tries every five seconds."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """A coordinator before this one was to load it again."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class RingUp:
    """It serves, and is to from now on; said again of a ring that is up, it changes nothing."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class LoadBegun:
    """Because of `LoadNow`, or because somebody asked for it."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class RingEnded:
    """A ring that was up is lost, or a load that had begun failed; its memory is free again."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class NoPlace:
    """With the peers that are there it cannot be loaded."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class RoomChanged:
    """A peer came, or one has less to hold than before."""


@dataclass(frozen=True, slots=True)
class LetGo:
    """Nobody wants it any more."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class LoadNow:
    """To be answered by LoadBegun or NoPlace."""

    model: ModelId


Told = Remembered | RingUp | LoadBegun | RingEnded | NoPlace | RoomChanged | LetGo


@dataclass(slots=True)
class _Wish:
    ends: int = 0
    """How often in a row it was lost or failed to load, which the pauses grow with."""
    failed_loads: int = 0
    """How many of them failed to load, since it last came up."""
    up_s: float | None = None
    """Since when it serves."""
    due_s: float | None = None
    """When it is to be loaded; None while it serves or loads."""
    placeless: bool = False


class DesiredRings:
    """A `Machine[Told, object, LoadNow]` for all models; what is said of one that nobody wants is nothing."""

    def __init__(self) -> None:
        self._wishes: dict[ModelId, _Wish] = {}
        self._events: list[LoadNow] = []

    def receive(self, message: Told, now: float) -> None:
        match message:
            case RoomChanged():
                for wish in self._wishes.values():
                    if wish.placeless:
                        wish.due_s = now
            case LetGo(model=model):
                self._wishes.pop(model, None)
            case Remembered(model=model):
                self._wishes[model] = _Wish(ends=1, due_s=now + RETURN_S)
            case RingUp(model=model):
                wish = self._wishes.setdefault(model, _Wish())
                wish.due_s, wish.placeless, wish.failed_loads = None, False, 0
                wish.up_s = now if wish.up_s is None else wish.up_s
            case _ if (known := self._wishes.get(message.model)) is not None:
                _note(known, message, now)

    def handle_timer(self, now: float) -> None:
        for model, wish in self._wishes.items():
            if wish.due_s is not None and wish.due_s <= now:
                wish.due_s, wish.placeless = None, False
                self._events.append(LoadNow(model))

    def next_timer(self) -> float | None:
        return min((wish.due_s for wish in self._wishes.values() if wish.due_s is not None), default=None)

    def outgoing(self) -> list[object]:
        """It sends nothing."""
        return []

    def events(self) -> list[LoadNow]:
        return drain(self._events)

    def next_try_s(self, model: ModelId) -> float | None:
        """When it is to be loaded; None while it serves or loads, and for a model that nobody wants."""
        wish = self._wishes.get(model)
        return None if wish is None else wish.due_s

    def failed_loads(self, model: ModelId) -> int:
        """How many loads have failed since it last served; that it was lost is none of them."""
        wish = self._wishes.get(model)
        return 0 if wish is None else wish.failed_loads


def _note(wish: _Wish, message: LoadBegun | RingEnded | NoPlace, now: float) -> None:
    match message:
        case LoadBegun():
            wish.due_s, wish.placeless = None, False
        case NoPlace():
            wish.due_s, wish.placeless = now + LOOK_AGAIN_S, True
        case RingEnded():
            if wish.up_s is None:
                wish.failed_loads += 1
            elif now - wish.up_s >= STEADY_S:
                wish.ends = 0
            wish.up_s, wish.due_s, wish.placeless = None, now + pause_s(wish.ends), False
            wish.ends += 1


def pause_s(ends: int) -> float:
    """Before the next load, after so many ends in a row before this one: none, then RETRY_S doubling up to
    RETRY_MOST_S."""
    return min(RETRY_MOST_S, RETRY_S * 2.0 ** min(ends - 1, 16)) if ends else 0.0
