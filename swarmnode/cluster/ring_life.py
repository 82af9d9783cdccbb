"""The life of one loaded ring as the coordinator drives it: prepare, link, probe, ready, link anew, and every way out.

A pure machine: peers' reports and time go in, commands to peers and facts about the ring come out. Whatever happens,
every stage that was ever told to load is told to unload, and the ring is over when each has answered, left, or let
its deadline pass. A ring that was ready and whose link breaks is not unloaded: its stages live, so once no cause
but the link has shown itself they are linked anew, under the next link epoch. So is a ring whose coordinator was away,
once its stages have said that they are still there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from swarmnode.cluster.ring_life_messages import (
    ProbeReturned,
    Progress,
    RingLost,
    RingOver,
    RingParted,
    RingReady,
    RingRelinked,
    SendLink,
    SendLoad,
    SendProbe,
    SendUnload,
    StageDown,
    StageLinked,
    StageReady,
    StageUnloaded,
    UnloadAsked,
)
from swarmnode.machine import drain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.cluster.ring_life_messages import RingCommand, RingEvent, RingInput
    from swarmnode.ids import NodeId

LOAD_PROGRESS_S = 60.0
"""A load that reports nothing for this long is given up; a slow disk or link still reports bytes."""
LINK_S = 10.0
PROBE_S = 10.0
CAUSE_S = 1.0
"""A stage that dies takes its links along, and who sees only those may speak first; the cause follows within this."""
RELINK_TRIES = 3
RELINK_S = 30.0
"""For all tries together: a router that starts anew is slower, but then its machines are gone for membership too."""
ADOPT_S = 20.0
"""After a coordinator's return, for the peers of its rings to find it; the slowest tries every five seconds."""
UNLOAD_S = 15.0
"""A worker is asked for 3 s, then killed at the latest after 10 more; beyond that the node itself is in trouble."""


class RingState(Enum):
    PREPARING = "preparing"
    LINKING = "linking"
    PROBING = "probing"
    READY = "ready"
    ADOPTING = "adopting"
    RELINKING = "relinking"
    ENDING = "ending"
    OVER = "over"


class _Step(Enum):
    """Of linking anew: wait for another cause to show, link, probe."""

    CAUSE = "cause"
    LINK = "link"
    PROBE = "probe"


@dataclass(slots=True)
class _Parting:
    symptom: StageDown
    """The first one: what the ring is lost by, should linking anew fail."""
    until_s: float
    step: _Step = _Step.CAUSE
    tries: int = 0


class RingLife:
    """A `Machine[RingInput, RingCommand, RingEvent]`; starting it sends the loads, but where it is `adopted`: then its
    stages were loaded for a coordinator before this one."""

    def __init__(self, nodes: Sequence[NodeId], now: float, *, adopted: bool = False) -> None:
        self.nodes = tuple(nodes)
        self.state = RingState.ADOPTING if adopted else RingState.PREPARING
        self.progress: dict[int, Progress] = {}
        self.error: RingLost | None = None
        self.links = 0
        """The link epoch: how often the stages were linked anew."""
        self._parting: _Parting | None = None
        """While it is being linked anew."""
        self._by_symptom = False
        self._ready: dict[int, StageReady] = {}
        self._linked: set[int] = set()
        self._held = set() if adopted else set(range(len(nodes)))
        """Stages that are to be unloaded at the end; of an adopted ring those that said that they are there."""
        self._heard_s = dict.fromkeys(range(len(nodes)), now)
        self._deadline_s = now + ADOPT_S
        self._outgoing: list[RingCommand] = [] if adopted else [SendLoad(i) for i in range(len(nodes))]
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
                self._held.add(stage)
                self._heard_s[stage] = now
                self._ready[stage] = message
                if len(self._ready) == len(self.nodes):
                    self._all_ready(now)
            case StageLinked(stage=stage, links=links):
                if links == self.links:
                    self._linked.add(stage)
                    self._probe_if_linked(now)
            case ProbeReturned():
                self._probe_returned()

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
            case RingState.ADOPTING:
                stage = min(set(range(len(self.nodes))) - set(self._ready))
                self._lose("stage_lost", f"stage {stage} did not come back within {ADOPT_S:.0f} s", stage, now)
            case RingState.RELINKING:
                self._relink_timer(now)
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
            case RingState.READY | RingState.OVER:
                return None
            case _:
                return self._deadline_s

    def outgoing(self) -> list[RingCommand]:
        return drain(self._outgoing)

    def events(self) -> list[RingEvent]:
        return drain(self._events)

    @property
    def kv_tokens(self) -> int:
        """The ring's budget once all stages are ready: the smallest of theirs."""
        return min((r.kv_tokens for r in self._ready.values()), default=0)

    def condition(self, stage: int) -> str | None:
        """`ready`, or what became of it since: `lost` by a fault, `ended`. None: it has not loaded yet."""
        if self.error is not None and self.error.stage == stage:
            return "lost"
        if stage not in self._ready:
            return None
        return "ready" if stage in self._held else "ended"

    def _all_ready(self, now: float) -> None:
        if self.state is RingState.PREPARING:
            self._link(now)
        elif self.state is RingState.ADOPTING:
            self.links = max(ready.links for ready in self._ready.values())
            self.state = RingState.RELINKING
            away = StageDown(0, "stage_lost", "the coordinator was away", symptom=True, links=self.links)
            self._parting = _Parting(away, now + RELINK_S)
            self._relink(self._parting, now)

    def _link(self, now: float) -> None:
        self._enter(RingState.LINKING, now + LINK_S)
        self._send_links()

    def _send_links(self) -> None:
        self._linked.clear()
        count = len(self.nodes)
        for stage in range(count):
            address = self._ready[(stage + 1) % count].address
            self._outgoing.append(SendLink(stage, address, self.links))

    def _probe_if_linked(self, now: float) -> None:
        if len(self._linked) < len(self.nodes):
            return
        if self.state is RingState.LINKING:
            self._enter(RingState.PROBING, now + PROBE_S)
            self._outgoing.append(SendProbe())
        elif self._parting is not None and self._parting.step is _Step.LINK:
            self._go(_Step.PROBE, now + PROBE_S)
            self._outgoing.append(SendProbe())

    def _probe_returned(self) -> None:
        if self.state is RingState.PROBING:
            self.state = RingState.READY
            self._events.append(RingReady())
        elif self._parting is not None and self._parting.step is _Step.PROBE:
            self.state, self._parting = RingState.READY, None
            self._events.append(RingRelinked())

    # linking anew

    def _part(self, symptom: StageDown, now: float) -> None:
        """A link of the ring broke. Its cause may still show; what an earlier link epoch reports is history."""
        if symptom.links != self.links:
            return
        if self._parting is None:
            self._parting = _Parting(symptom, now + RELINK_S)
            self.state = RingState.RELINKING
            self._go(_Step.CAUSE, now + CAUSE_S)
        elif self._parting.step is not _Step.CAUSE:
            self._try_again(symptom.message, now)

    def _relink_timer(self, now: float) -> None:
        parting = self._parting
        if parting is None:
            return
        if parting.step is _Step.CAUSE:
            self._relink(parting, now)
        elif parting.step is _Step.LINK:
            stage = min(set(range(len(self.nodes))) - self._linked)
            self._try_again(f"stage {stage} did not reach its neighbour", now)
        else:
            self._try_again("the probe did not come round the ring", now)

    def _relink(self, parting: _Parting, now: float) -> None:
        if parting.tries == 0:
            self._events.append(RingParted(parting.symptom.message))
        parting.tries += 1
        self.links += 1
        self._send_links()
        self._go(_Step.LINK, now + LINK_S)

    def _try_again(self, why: str, now: float) -> None:
        """Another round, unless that was the last: then the ring is lost by what broke it first."""
        parting = self._parting
        if parting is None:
            return
        if parting.tries < RELINK_TRIES and now + CAUSE_S < parting.until_s:
            self._go(_Step.CAUSE, now + CAUSE_S)
            return
        first = parting.symptom
        text = f"{first.message}; linking it anew failed {parting.tries} times, at last because {why}"
        self._by_symptom = True
        self._lose(first.code, text, first.stage, now)

    def _go(self, step: _Step, deadline_s: float) -> None:
        if self._parting is not None:
            self._parting.step = step
            self._deadline_s = min(deadline_s, self._parting.until_s)

    # ends

    def _enter(self, state: RingState, deadline_s: float) -> None:
        self.state, self._deadline_s = state, deadline_s

    def _down(self, down: StageDown, now: float) -> None:
        if down.gone:
            self._held.discard(down.stage)
        if self.error is not None and self._by_symptom and not down.symptom:
            self.error = RingLost(down.code, down.message, down.stage, self.error.was_ready)
            self._by_symptom = False
        elif self.error is None and down.symptom and self.state in (RingState.READY, RingState.RELINKING):
            self._part(down, now)
        elif down.symptom and self.state is RingState.ADOPTING:
            pass  # it will be linked anew whatever its links went through
        elif self.error is None:
            self._by_symptom = down.symptom
            self._lose(down.code, down.message, down.stage, now)
        self._maybe_over()

    def _lose(self, code: str, message: str, stage: int | None, now: float) -> None:
        """End the ring because of a fault; only the first fault is reported."""
        if self.state in (RingState.ENDING, RingState.OVER):
            return
        was_ready = self.state in (RingState.READY, RingState.RELINKING, RingState.ADOPTING)
        self.error = RingLost(code, message, stage, was_ready)
        self._events.append(self.error)
        self._end(now)

    def _end(self, now: float) -> None:
        if self.state in (RingState.ENDING, RingState.OVER):
            return
        self._parting = None
        self._enter(RingState.ENDING, now + UNLOAD_S)
        self._held -= {command.stage for command in self._outgoing if isinstance(command, SendLoad)}  # never sent
        self._outgoing = [command for command in self._outgoing if not isinstance(command, SendLoad)]
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
