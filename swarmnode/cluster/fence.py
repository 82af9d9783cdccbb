"""What a node lets coordinators say: nothing of one whose term is over. Kept at the receiver, where alone it is safe.

A lease does not stop a command that is already on its way; a receiver that has heard a later term does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnode.errors import StaleTerm

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True)
class Fence:
    """The latest term that a coordinator was heard in. A node that votes knows of one before it hears its
    coordinator: `voted` gives the latest that it voted in, or was told by another voter."""

    term: int = 0
    voted: Callable[[], int] = lambda: 0

    def check(self, term: int) -> None:
        """Let a command of `term` pass; raises StaleTerm."""
        latest = max(self.term, self.voted())
        if term < latest:
            raise StaleTerm(
                f"the coordinator of term {term} speaks, and term {latest} has begun, as this node knows; "
                "whoever sent this does not coordinate any more"
            )

    def admit(self, term: int) -> None:
        """The same of whoever is there for the first time. A later term is on disk before that."""
        self.check(term)
        self.term = term
