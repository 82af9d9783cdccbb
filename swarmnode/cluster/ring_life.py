"""The life of one loaded ring as the coordinator drives it: prepare, link, probe, ready, and every way out.

A pure machine: peers' reports and time go in, commands to peers and facts about the ring come out. Whatever happens,
every stage that was ever told to load is told to unload, and the ring is over when each has answered, left, or let
its deadline pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from swarmnode.machine import drain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.ids import NodeId

LOAD_PROGRESS_S = 60.0
"""A load that reports nothing for this long is given up; a slow disk or link still reports bytes."""
LINK_S = 10.0
PROBE_S = 10.0
UNLOAD_S = 15.0
"""A worker is asked for 3 s, then killed at the latest after 10 more; beyond that the node itself is in trouble."""


class RingState(Enum):
    PREPARING = "preparing"
    LINKING = "linking"
    PROBING = "probing"
    READY = "ready"
    ENDING = "ending"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Progress:
    """A stage is fetching or loading: `done` of `total` bytes (or layers) in `phase`."""

    stage: int
    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class StageReady:
    """The stage's worker has loaded; `address` is where its ring lanes are dialled, `kv_tokens` what it can hold."""

    stage: int
    address: str
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class StageLinked:
    """The stage's outgoing lanes are up."""

    stage: int


@dataclass(frozen=True, slots=True)
class ProbeReturned:
    """A throwaway position went all the way round."""


@dataclass(frozen=True, slots=True)
class StageDown:
    """A stage failed or went away; `gone` means nothing is left there to unload.

    `symptom`: it only saw a neighbour's link end, so whoever names the cause later is right about it.
    """

    stage: int
    code: str
    message: str
    gone: bool = False
    symptom: bool = False


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
    """Tell a stage to dial its successor's address (host:port)."""

    stage: int
    next_address: str


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
class RingLost:
    """The ring serves no more; its requests end with this error. `was_ready` tells a loss from a failed load."""

    code: str
    message: str
    stage: int | None
    was_ready: bool


@dataclass(frozen=True, slots=True)
class RingOver:
    """Every stage has given its memory back (or can no longer be asked)."""


RingEvent = RingReady | RingLost | RingOver


class RingLife:
    """A `Machine[RingInput, RingCommand, RingEvent]`; starting it sends the loads."""

    def __init__(self, nodes: Sequence[NodeId], now: float) -> None:
        self.nodes = tuple(nodes)
        self.state = RingState.PREPARING
        self.progress: dict[int, Progress] = {}
        self.error: RingLost | None = None
        self._by_symptom = False
        self._ready: dict[int, StageReady] = {}
        self._linked: set[int] = set()
        self._held = set(range(len(nodes)))
        self._heard_s = dict.fromkeys(range(len(nodes)), now)
        self._deadline_s = now
        self._outgoing: list[RingCommand] = [SendLoad(i) for i in range(len(nodes))]
        self._events: list[RingEvent] = []

    def receive(self, message: RingInput, now: float) -> None:
        match message:
            case UnloadAsked():
                self._end(now)
            case StageUnloaded(stage=stage):
                self._unloaded(stage, now)
            case StageDown():
                self._down(message, now)
            case _ if self.state in (RingState.ENDING, RingState.OVER):
                pass  # reports that crossed the unload
            case Progress(stage=stage):
                self._heard_s[stage] = now
                self.progress[stage] = message
            case StageReady(stage=stage):
                self._heard_s[stage] = now
                self._ready[stage] = message
                if self.state is RingState.PREPARING and len(self._ready) == len(self.nodes):
                    self._link(now)
            case StageLinked(stage=stage):
                self._linked.add(stage)
                if self.state is RingState.LINKING and len(self._linked) == len(self.nodes):
                    self._enter(RingState.PROBING, now + PROBE_S)
                    self._outgoing.append(SendProbe())
            case ProbeReturned():
                if self.state is RingState.PROBING:
                    self.state = RingState.READY
                    self._events.append(RingReady())

    def handle_timer(self, now: float) -> None:
        deadline = self.next_timer()
        if deadline is None or now < deadline:
            return
        match self.state:
            case RingState.PREPARING:
                stage = min((s for s in self._heard_s if s not in self._ready), key=lambda s: (self._heard_s[s], s))
                self._lose("stalled", f"stage {stage} reported no progress for {LOAD_PROGRESS_S:.0f} s", stage, now)
            case RingState.LINKING:
                stage = min(set(range(len(self.nodes))) - self._linked)
                self._lose(
                    "link_broken",
                    f"stage {stage} could not reach its neighbour in {LINK_S:.0f} s",
                    stage,
                    now,
                )
            case RingState.PROBING:
                self._lose("link_broken", f"the probe did not come round the ring in {PROBE_S:.0f} s", None, now)
            case RingState.ENDING:
                self._held.clear()
                self._maybe_over()
            case _:
                pass

    def next_timer(self) -> float | None:
        match self.state:
            case RingState.PREPARING:
                waiting = [at for stage, at in self._heard_s.items() if stage not in self._ready]
                return min(waiting) + LOAD_PROGRESS_S if waiting else None
            case RingState.LINKING | RingState.PROBING | RingState.ENDING:
                return self._deadline_s
            case _:
                return None

    def outgoing(self) -> list[RingCommand]:
        return drain(self._outgoing)

    def events(self) -> list[RingEvent]:
        return drain(self._events)

    @property
    def kv_tokens(self) -> int:
        """The ring's budget once all stages are ready: the smallest of theirs."""
        return min((r.kv_tokens for r in self._ready.values()), default=0)

    def is_ready(self, stage: int) -> bool:
        """The stage has loaded."""
        return stage in self._ready

    def _link(self, now: float) -> None:
        self._enter(RingState.LINKING, now + LINK_S)
        count = len(self.nodes)
        for stage in range(count):
            address = self._ready[(stage + 1) % count].address
            self._outgoing.append(SendLink(stage, address))

    def _enter(self, state: RingState, deadline_s: float) -> None:
        self.state, self._deadline_s = state, deadline_s

    def _down(self, down: StageDown, now: float) -> None:
        if down.gone:
            self._held.discard(down.stage)
        if self.error is not None and self._by_symptom and not down.symptom:
            self.error = RingLost(down.code, down.message, down.stage, self.error.was_ready)
            self._by_symptom = False
        elif self.error is None:
            self._by_symptom = down.symptom
            self._lose(down.code, down.message, down.stage, now)
        self._maybe_over()

    def _lose(self, code: str, message: str, stage: int | None, now: float) -> None:
        """End the ring because of a fault; only the first fault is reported."""
        if self.state in (RingState.ENDING, RingState.OVER):
            return
        self.error = RingLost(code, message, stage, self.state is RingState.READY)
        self._events.append(self.error)
        self._end(now)

    def _end(self, now: float) -> None:
        if self.state in (RingState.ENDING, RingState.OVER):
            return
        self._enter(RingState.ENDING, now + UNLOAD_S)
        self._outgoing += [SendUnload(stage) for stage in sorted(self._held)]
        self._maybe_over()

    def _unloaded(self, stage: int, now: float) -> None:
        """A stage gave its memory back; unasked, that is a loss like any other."""
        self._held.discard(stage)
        self._lose("stage_lost", f"stage {stage} unloaded by itself", stage, now)
        self._maybe_over()

    def _maybe_over(self) -> None:
        if self.state is RingState.ENDING and not self._held:
            self.state = RingState.OVER
            self._events.append(RingOver())
