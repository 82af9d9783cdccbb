"""What members and their coordinator say to each other in virtual time, and the weather that befalls it.

A link is named by a number, and is up only after the three steps of a handshake, as a connection of the wire is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sims import timeline
from swarmnode.ids import NodeId

if TYPE_CHECKING:
    from swarmnode.cluster.member_table import Mark
    from swarmnode.cluster.membership import Heard
    from swarmnode.cluster.roll import Answer

COORDINATOR = NodeId("coordinator")


@dataclass(frozen=True, slots=True)
class Weather(timeline.Weather):
    """Frames are held up for longer than silence may last."""

    loss: float = 0.02
    late_s: float = 40.0


@dataclass(frozen=True, slots=True)
class Dial:
    """A handshake's beginning, its answer and its end: a link is up only when all three came through."""

    link: int
    step: int
    who: Heard


@dataclass(frozen=True, slots=True)
class Beat:
    link: int
    who: Heard
    held: Mark


@dataclass(frozen=True, slots=True)
class Answered:
    link: int
    who: Heard
    answer: Answer


@dataclass(frozen=True, slots=True)
class Closed:
    """The other end's socket was closed."""

    link: int
    who: Heard


Message = Dial | Beat | Answered | Closed


@dataclass(frozen=True, slots=True)
class Sent:
    node: NodeId
    """The host at the star's other end."""
    at_s: float
    message: Message
    term: int
    """Of the coordinator that it is from, or for."""
