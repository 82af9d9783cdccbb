"""A virtual ring: the real head and stages, the real scripted engine, on links and compute that only cost time.

Nothing of the rules is written again here. What is replaced is what `sims/` will replace: a link is a FIFO queue with
a latency, a forward is the engine's answer after the virtual seconds it asked for, and one heap orders it all. The
worker's loop (`compute/ring_loop.py`) is followed step by step: inputs wait while a forward runs, then all of them
are taken, then the timer, then what is to be sent, then the next work. The same calls give the same run, byte by byte.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from trace_text import event_text, message_text, work_text

from swarmnode.compute.ring_loop import run_work
from swarmnode.compute.scripted import ScriptedEngine
from swarmnode.compute.spec import StageSpec
from swarmnode.ids import RequestId, SessionId
from swarmnode.ring.head import (
    Cancel,
    Finished,
    Head,
    HeadConfig,
    Open,
    Probed,
    Refused,
    Sampled,
    StartProbe,
)
from swarmnode.ring.messages import Broken, Envelope
from swarmnode.ring.stage import Stage
from swarmnode.ring.work import DecodeRow, GroupWork, PieceWork, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from swarmnode.compute.script import Script
    from swarmnode.ring.head import HeadEvent, HeadInput
    from swarmnode.ring.work import Work, WorkResult

EOS = 0
GREEDY = Sampling(temperature=0.0)
QUIET_AFTER_S = 3600.0
"""Nothing in a ring may still be under way after this: the longest deadline is far shorter."""
QUIET_AFTER_STEPS = 200_000


@dataclass(frozen=True, slots=True)
class Link:
    """How long a message takes from one stage to the next; `jitter_s` is drawn per message, order is kept."""

    latency_s: float = 0.010
    jitter_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """What a test asks for. `max_new_tokens` None: until the model stops."""

    name: str
    prompt: tuple[int, ...]
    max_new_tokens: int | None = None
    sampling: Sampling = GREEDY


@dataclass(slots=True)
class Outcome:
    """What a request saw: its events in order, with the virtual second of each."""

    events: list[tuple[float, HeadEvent]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [event.token for _, event in self.events if isinstance(event, Sampled)]

    @property
    def ends(self) -> list[Finished | Refused]:
        return [event for _, event in self.events if isinstance(event, Finished | Refused)]

    @property
    def end(self) -> Finished | Refused:
        (only,) = self.ends
        return only

    def seconds_of(self, kind: type[HeadEvent]) -> float:
        """When the first event of `kind` came."""
        return next(at for at, event in self.events if isinstance(event, kind))


class WatchedEngine:
    """The engine, with a list of what it ran and the sessions it holds caches for; `sleep` only adds up seconds."""

    def __init__(self, script: Script, spec: StageSpec) -> None:
        self.slept_s = 0.0
        self.caches: set[SessionId] = set()
        self.works: list[Work] = []
        self._engine = ScriptedEngine(script, spec, self._sleep)

    def run(self, work: Work) -> WorkResult:
        self.works.append(work)
        rows = [work.session] if isinstance(work, PieceWork) else [row.session for row in work.rows]
        self.caches |= set(rows)
        return self._engine.run(work)

    def free(self, session: SessionId) -> None:
        self.caches.discard(session)
        self._engine.free(session)

    def kv_tokens(self) -> int:
        return self._engine.kv_tokens()

    def kv_bytes(self) -> int:
        return self._engine.kv_bytes()

    def _sleep(self, seconds: float) -> None:
        self.slept_s += seconds


@dataclass(slots=True)
class Node:
    """One stage's worker: a machine, an engine, and the inputs that wait while a forward runs."""

    stage: int
    machine: Head | Stage
    engine: WatchedEngine
    inbox: deque[HeadInput] = field(default_factory=deque)
    busy: bool = False
    hung: bool = False
    """Takes inputs and never answers, like a worker stuck in its driver."""


class RingWorld:
    """A ring of `num_stages` in virtual time; see the module docstring.

    `links[i]` is the link from stage i to the next (the last one's leads back to the head).
    """

    def __init__(
        self,
        config: HeadConfig,
        script: Script,
        *,
        links: Sequence[Link] | None = None,
        scripts: Mapping[int, Script] | None = None,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.now_s = 0.0
        self.log: list[str] = []
        self.outcomes: dict[str, Outcome] = {}
        self.probes: list[Probed] = []
        self.sent: list[tuple[float, int, Envelope]] = []
        """Every message put on a lane: when, by which stage, what."""
        self.watch: Callable[[RingWorld], None] = lambda world: None
        """Called after every step: the place for invariants."""
        self.head = Head(config)
        self.links = list(links or [Link()] * config.num_stages)
        count = config.num_stages
        self.stages = [Stage(index, count) for index in range(1, count)]
        self.nodes = [
            Node(index, machine, WatchedEngine((scripts or {}).get(index, script), stage_spec(index, count)))
            for index, machine in enumerate([self.head, *self.stages])
        ]
        self.cut: set[int] = set()
        """Links (by the stage that sends) that lose everything."""
        self._random = Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._last_delivery_s: dict[tuple[int, str], float] = {}
        self._timer_s: float | None = None

    # what a test says

    def open(self, request: Request, at_s: float | None = None) -> Outcome:
        """Send the request to the head, now or at a second; its outcome fills as the world runs."""
        outcome = self.outcomes.setdefault(request.name, Outcome())
        opened = Open(RequestId(request.name), request.prompt, request.max_new_tokens, request.sampling)
        self._input(opened, at_s)
        return outcome

    def cancel(self, name: str, at_s: float | None = None, reason: str = "cancelled") -> None:
        self._input(Cancel(RequestId(name), reason), at_s)

    def probe(self, nonce: int = 1) -> None:
        self._input(StartProbe(nonce), None)

    def lose_link(self, stage: int, *, tell_head: bool = True) -> None:
        """Cut the link that `stage` sends on; the head is told where it can be."""
        self.cut.add(stage)
        self._log("--", f"link {stage}>{self._next(stage)} is lost")
        if tell_head:
            self._at(self.now_s, lambda: self._deliver(0, Envelope("tok", Broken(stage))))

    def inject(self, stage: int, envelope: Envelope) -> None:
        """Hand a stage a message nobody sent: a late or repeated frame."""
        self._at(self.now_s, lambda: self._deliver(stage, envelope))

    # running

    def run_until(self, end_s: float) -> None:
        """Run everything due up to and at `end_s`."""
        while self._heap and self._heap[0][0] <= end_s:
            self._step()
        self.now_s = max(self.now_s, end_s)

    def run_until_quiet(self) -> None:
        """Run until nothing is under way and no deadline is awaited."""
        limit_s = self.now_s + QUIET_AFTER_S
        for steps in itertools.count():
            if not self._heap:
                return
            self._step()
            if self.now_s > limit_s or steps > QUIET_AFTER_STEPS:
                raise AssertionError("the ring does not come to rest; its last lines:\n" + "\n".join(self.log[-40:]))

    def leftovers(self) -> dict[str, int]:
        """Everything that must be zero when no request runs: machines, budgets and the engines' caches."""
        left = {f"head {key}": value for key, value in self.head.snapshot().items() if key != "kv_budget_tokens"}
        for stage in self.stages:
            left |= {f"stage {stage.index} {key}": value for key, value in stage.snapshot().items()}
        for node in self.nodes:
            left[f"engine {node.stage} sessions"] = len(node.engine.caches)
            left[f"engine {node.stage} kv_tokens"] = node.engine.kv_tokens()
        return {key: value for key, value in left.items() if value}

    def trace(self) -> str:
        return "\n".join(self.log) + "\n"

    # the loop

    def _input(self, message: HeadInput, at_s: float | None) -> None:
        self._at(self.now_s if at_s is None else at_s, lambda: self._deliver(0, message))

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when_s, self.now_s), next(self._order), action))

    def _step(self) -> None:
        self.now_s, _, action = heapq.heappop(self._heap)
        action()
        self._arm_timer()
        self.watch(self)

    def _arm_timer(self) -> None:
        """Wake the head at its deadline, as its loop's patience does; a busy one looks at it when it is done."""
        deadline_s, head = self.head.next_timer(), self.nodes[0]
        if deadline_s is not None and deadline_s != self._timer_s and not head.busy and not head.hung:
            self._timer_s = deadline_s
            self._at(deadline_s, self._fire_timer)

    def _fire_timer(self) -> None:
        self._timer_s = None
        self._turn(self.nodes[0])

    def _deliver(self, stage: int, message: HeadInput) -> None:
        node = self.nodes[stage]
        if isinstance(message, Open):
            self._log("0", f"open {message.request}: {len(message.prompt)} tokens")
        elif isinstance(message, Cancel):
            self._log("0", f"cancel {message.request} ({message.reason})")
        node.inbox.append(message)
        self._turn(node)

    def _turn(self, node: Node) -> None:
        """One round of the worker's loop; while a forward runs, inputs wait."""
        if node.busy or node.hung:
            return
        while node.inbox:
            message = node.inbox.popleft()
            node.machine.receive(message, self.now_s)  # type: ignore[arg-type]
        node.machine.handle_timer(self.now_s)
        self._flush(node)
        work = node.machine.next_work(self.now_s)
        self._flush(node)
        if work is not None:
            self._start(node, work)

    def _start(self, node: Node, work: Work) -> None:
        node.engine.slept_s = 0.0
        result = run_work(node.engine, work)
        took_s = node.engine.slept_s
        node.busy = True
        self._log(str(node.stage), work_text(work, took_s, result.failed))
        self._at(self.now_s + took_s, lambda: self._complete(node, work, replace(result, compute_ms=took_s * 1e3)))

    def _complete(self, node: Node, work: Work, result: WorkResult) -> None:
        node.busy = False
        node.machine.complete(work, result, self.now_s)
        self._flush(node)
        self._turn(node)

    def _flush(self, node: Node) -> None:
        for session in node.machine.freed():
            if session in node.engine.caches:
                self._log(str(node.stage), f"frees session {session}")
            node.engine.free(session)
        for envelope in node.machine.outgoing():
            self._send(node.stage, envelope)
        if isinstance(node.machine, Head):
            for event in node.machine.events():
                self._happened(event)

    def _send(self, stage: int, envelope: Envelope) -> None:
        target, link = self._next(stage), self.links[stage]
        self._log(f"{stage}>{target}", f"{envelope.lane:3} {message_text(envelope.message)}")
        self.sent.append((self.now_s, stage, envelope))
        if stage in self.cut:
            return
        due_s = self.now_s + link.latency_s + link.jitter_s * self._random.random()
        lane = (stage, envelope.lane)
        due_s = self._last_delivery_s[lane] = max(due_s, self._last_delivery_s.get(lane, 0.0))
        self._at(due_s, lambda: None if stage in self.cut else self._deliver(target, envelope))

    def _happened(self, event: HeadEvent) -> None:
        self._log("**", event_text(event))
        if isinstance(event, Probed):
            self.probes.append(event)
        else:
            self.outcomes[event.request].events.append((self.now_s, event))

    def _next(self, stage: int) -> int:
        return (stage + 1) % self.config.num_stages

    def _log(self, where: str, what: str) -> None:
        self.log.append(f"{self.now_s * 1e3:9.1f} ms  {where:4} {what}")


def stage_spec(index: int, count: int) -> StageSpec:
    """One layer a stage: as much as a scripted engine needs to know."""
    return StageSpec(Path(), (), index, index + 1, count, index == 0, index == count - 1)


def head_config(num_stages: int = 2, **changes: object) -> HeadConfig:
    """A small ring's settings, with what a test changes."""
    base = HeadConfig(
        num_stages=num_stages,
        context_tokens=4096,
        kv_tokens=8192,
        max_in_flight=16,
        max_waiting=16,
        eos_token_ids=frozenset({EOS}),
        prefill_chunk=4,
        typical_tokens=64,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def tokens_alone(script: Script, request: Request, eos: frozenset[int] = frozenset({EOS})) -> list[int]:
    """The reply one engine that holds all layers gives, without any ring: the obvious implementation."""
    engine = ScriptedEngine(script, stage_spec(0, 1), lambda seconds: None)
    session, prompt = SessionId(1), request.prompt
    tokens = list(engine.run(PieceWork(session, 0, prompt, True, sampling=request.sampling)).tokens)
    while tokens[-1] not in eos and (request.max_new_tokens is None or len(tokens) < request.max_new_tokens):
        row = DecodeRow(session, len(prompt) + len(tokens) - 1, tokens[-1])
        tokens += engine.run(GroupWork((row,))).tokens
    return tokens
