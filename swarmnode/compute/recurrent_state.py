"""The state of a linear-attention layer: what a session has there instead of keys and values.

Such a layer sums its whole past up in two tensors of fixed size (the last inputs of a convolution and a recurrent
matrix), so it cannot be cropped: it continues at exactly its length, or goes back to where its last forward began,
which is kept so that a forward that failed can be run again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmnode.errors import StageFailed

if TYPE_CHECKING:
    import torch


class RecurrentState:
    """One layer's state of one session after `length` positions. Tensors are replaced; only `conv` is written into,
    by the blocks, between `begin` and `finish`."""

    __slots__ = ("_before", "_running", "conv", "length", "recurrent")

    def __init__(self) -> None:
        self.conv: torch.Tensor | None = None
        self.recurrent: torch.Tensor | None = None
        self.length = 0
        self._before: tuple[torch.Tensor | None, torch.Tensor | None, int] | None = None
        self._running = False

    def begin(self) -> None:
        """A forward starts here."""
        self._before, self._running = (self.conv, self.recurrent, self.length), True
        if self.conv is not None:
            self.conv = self.conv.clone()

    def finish(self, n: int) -> None:
        """It read `n` positions."""
        self.length += n
        self._running = False

    def check_crop(self, length: int) -> None:
        """Raise StageFailed unless `crop(length)` can be done."""
        before = None if self._before is None else self._before[2]
        if length not in (self.length, before, 0):
            raise StageFailed(
                f"a layer with a recurrent state holds {self.length} positions; its past cannot be cut to {length}"
                + ("" if before in (None, self.length) else f", only to {before}, where its last forward began")
            )

    def crop(self, length: int) -> None:
        """Go back to `length`, also out of a forward that failed halfway; see `check_crop`."""
        self.check_crop(length)
        if self._before is not None and (self._running or length == self._before[2]):
            self.conv, self.recurrent, self.length = self._before
            self._before, self._running = None, False
        if length != self.length:
            self.conv, self.recurrent, self.length, self._before = None, None, 0, None

    def copy(self) -> RecurrentState:
        """The same state for another session; the tensors are shared, because neither session writes into them."""
        made = RecurrentState()
        made.conv, made.recurrent, made.length = self.conv, self.recurrent, self.length
        made._before, made._running = self._before, self._running
        return made

    def size_bytes(self) -> int:
        held = (self.conv, self.recurrent, *(self._before or ())[:2])
        return sum(t.nbytes for t in {id(t): t for t in held if t is not None}.values())


def copy_states(states: dict[int, RecurrentState], length: int) -> dict[int, RecurrentState]:
    """What a session that continues from `length` positions takes over, by layer; raises StageFailed where a state is
    of another length. Moving needs nothing: the states go along with the cache that holds them."""
    made = {layer: state.copy() for layer, state in states.items()}
    crop_states(made, length)
    return made


def crop_states(states: dict[int, RecurrentState], length: int) -> None:
    """Crop all layers' states or, raising StageFailed, none."""
    for state in states.values():
        state.check_crop(length)
    for state in states.values():
        state.crop(length)
