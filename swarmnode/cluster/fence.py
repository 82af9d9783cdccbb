"""What a node lets coordinators say: nothing of one whose term is over. Kept at the receiver, where alone it is safe.

A lease does not stop a command that is already on its way; a receiver that has heard a later term does.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.errors import StaleTerm


@dataclass(slots=True)
class Fence:
    """The latest term that was heard, of whichever coordinator."""

    term: int = 0

    def check(self, term: int) -> None:
        """Let a command of `term` pass; raises StaleTerm."""
        if term < self.term:
            raise StaleTerm(
                f"the command is of term {term}, and a coordinator of term {self.term} was heard here; "
                "whoever sent it does not coordinate any more"
            )

    def admit(self, term: int) -> None:
        """The same of whoever is there for the first time. A later term is on disk before that."""
        self.check(term)
        self.term = term
