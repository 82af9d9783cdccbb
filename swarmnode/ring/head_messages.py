"""What the head is told, and what it reports about requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarmnode.ring.messages import Envelope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swarmnode.ids import RequestId
    from swarmnode.ring.cost_model import StageCosts
    from swarmnode.ring.work import Sampling


@dataclass(frozen=True, slots=True)
class Open:
    """A tokenized request. `max_new_tokens` None: until the model stops or the context is full."""

    request: RequestId
    prompt: tuple[int, ...]
    max_new_tokens: int | None
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request early: the client left ("cancelled"), or its text met a stop string ("stop")."""

    request: RequestId
    reason: str = "cancelled"


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Send a throwaway message round both lanes; `Probed` follows when it came back on each.

    A ring that was lost is reset first, and serves again with its `Probed`.
    """

    nonce: int


@dataclass(frozen=True, slots=True)
class RingMeasured:
    """What the stages measured of themselves after loading, before the first request."""

    kv_tokens: int
    """The smallest budget of all stages: what the head admits by from now on."""
    costs: tuple[StageCosts | None, ...]
    """By stage: where its costs start, until real steps say more; None: it measured none."""
    max_group: int = 0
    """Most rows of a decode group by the oldest card's rule, which holds while costs are not known; 0: no cap."""


HeadInput = Open | Cancel | StartProbe | RingMeasured | Envelope


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request can ever fit; it waits for its turn or runs."""

    request: RequestId
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Started:
    request: RequestId


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token of the reply, in order, including the model's end-of-turn token."""

    request: RequestId
    token: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Clean end: "stop", "length" or "cancelled"."""

    request: RequestId
    reason: str
    prompt_tokens: int
    completion_tokens: int
    timing: Mapping[str, Any]
    cached_tokens: int = 0
    """Of the prompt: positions that were continued from a parked conversation instead of being read again."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The request ended with an error, before or after it was accepted."""

    request: RequestId
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe came back on both lanes; `round_ms` is the slower lane's time."""

    nonce: int
    round_ms: float


@dataclass(frozen=True, slots=True)
class RingBroken:
    """The head gave its ring up; it may be the only one who noticed (a stage that hangs breaks no link)."""

    why: str


HeadEvent = Accepted | Started | Sampled | Finished | Refused | Probed | RingBroken
