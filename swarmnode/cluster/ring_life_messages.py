"""What the life of a ring is told, what it wants of the peers, and what becomes of the ring."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """A stage is fetching or loading: `done` of `total` bytes (or layers) in `phase`."""

    stage: int
    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class StageReady:
    """The stage's worker has loaded; `address` is where its ring lanes are dialled, `kv_tokens` what it can hold.

    `links`: the latest link epoch it knows, where it was linked before.
    """

    stage: int
    address: str
    kv_tokens: int
    links: int = 0


@dataclass(frozen=True, slots=True)
class StageLinked:
    """The stage's outgoing lanes are up, under this link epoch."""

    stage: int
    links: int = 0


@dataclass(frozen=True, slots=True)
class ProbeReturned:
    """A throwaway position went all the way round."""


@dataclass(frozen=True, slots=True)
class StageDown:
    """A stage failed or went away; `gone` means nothing is left there to unload.

    `symptom`: it only saw a neighbour's link end, in the link epoch `links`, so whoever names the cause later is right
    about it.
    """

    stage: int
    code: str
    message: str
    gone: bool = False
    symptom: bool = False
    links: int = 0


@dataclass(frozen=True, slots=True)
class UnloadAsked:
    """An operator (or eviction, idle, shutdown) wants the ring gone."""


@dataclass(frozen=True, slots=True)
class StageUnloaded:
    stage: int


RingInput = Progress | StageReady | StageLinked | ProbeReturned | StageDown | UnloadAsked | StageUnloaded


@dataclass(frozen=True, slots=True)
class SendLoad:
    stage: int


@dataclass(frozen=True, slots=True)
class SendLink:
    """Tell a stage to dial its successor's address (host:port), under this link epoch; what it had before is over."""

    stage: int
    next_address: str
    links: int = 0


@dataclass(frozen=True, slots=True)
class SendProbe:
    """Tell stage 0 to send a throwaway message round."""


@dataclass(frozen=True, slots=True)
class SendUnload:
    stage: int


RingCommand = SendLoad | SendLink | SendProbe | SendUnload


@dataclass(frozen=True, slots=True)
class RingReady:
    pass


@dataclass(frozen=True, slots=True)
class RingParted:
    """A link broke and nothing else: what ran is over, and the stages are being linked anew."""

    message: str


@dataclass(frozen=True, slots=True)
class RingRelinked:
    """It serves again, with all that the stages have loaded."""


@dataclass(frozen=True, slots=True)
class RingLost:
    """The ring serves no more; its requests end with this error. `was_ready` tells a loss from a failed load."""

    code: str
    message: str
    stage: int | None
    was_ready: bool


@dataclass(frozen=True, slots=True)
class RingOver:
    """Every stage has given its memory back (or can no longer be asked)."""


RingEvent = RingReady | RingParted | RingRelinked | RingLost | RingOver
