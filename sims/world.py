"""A virtual ring: the real head and stages on links and compute that only cost time.

Nothing of the rules is written again here. What is replaced is links and compute: a link is a FIFO queue per lane
with a latency and a bandwidth, a forward is the engine's answer after the virtual seconds it asked for, and one heap
orders it all. The worker's loop (`compute/ring_loop.py`) is followed step by step: inputs wait while a step runs
(beside a prompt piece they are taken at once), then all of them are taken with the time of their arrival, then the
timer, then what is to be sent, then the next work. The same calls give the same run, byte by byte.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from sims.trace_text import event_text, message_text, work_text
from swarmnode.ids import RequestId
from swarmnode.ring.head import Head
from swarmnode.ring.head_messages import (
    Cancel,
    Finished,
    HeadEvent,
    HeadInput,
    Open,
    Probed,
    Refused,
    RingBroken,
    RingMeasured,
    Sampled,
    StartProbe,
)
from swarmnode.ring.messages import Broken, Envelope, Group, Piece
from swarmnode.ring.stage import Stage
from swarmnode.ring.work import PieceWork, Sampling, Work, WorkResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sims.engines import TimedEngine
    from swarmnode.ids import SessionId
    from swarmnode.ring.head_config import HeadConfig
    from swarmnode.ring.schedule import Schedule

GREEDY = Sampling(temperature=0.0)
QUIET_AFTER_S = 3600.0
"""Nothing in a ring may still be under way after this: the longest deadline is far shorter."""
QUIET_AFTER_STEPS = 200_000
LOG_TAIL = 40


@dataclass(frozen=True, slots=True)
class Link:
    """How long a message takes from one stage to the next; `jitter_s` is drawn per message, order is kept.

    Lanes `act`/`tok` and `pre` are connections of their own: a small frame does not stand behind pieces in a queue,
    it only shares the line with them, so it takes its own bytes at half the bandwidth.
    """

    latency_s: float = 0.010
    jitter_s: float = 0.0
    bytes_per_s: float | None = None

    def transfer_s(self, n_bytes: int, lane: str) -> float:
        if self.bytes_per_s is None:
            return 0.0
        return n_bytes / self.bytes_per_s * (1 if lane == "pre" else 2)


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for. `max_new_tokens` None: until the model stops."""

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
    def token_times_s(self) -> list[float]:
        return [at for at, event in self.events if isinstance(event, Sampled)]

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


@dataclass(slots=True)
class Node:
    """One stage's worker: a machine, an engine, and the inputs that wait while a step runs."""

    stage: int
    machine: Head | Stage
    engine: TimedEngine
    inbox: deque[tuple[float, HeadInput]] = field(default_factory=deque)
    busy: bool = False
    listens: bool = False
    """It is busy with a prompt piece, and takes inputs beside it."""
    busy_s: float = 0.0
    """Virtual seconds spent in forwards so far, the one under way included."""
    timer_s: float | None = None
    """When it is to be woken."""
    hung: bool = False
    """Takes inputs and never answers, like a worker stuck in its driver."""


class World:
    """A ring in virtual time; see the module docstring.

    `links[i]` is the link from stage i to the next (the last one's leads back to the head). With `trace` the world
    keeps a log of every line and every message sent.
    """

    def __init__(
        self,
        config: HeadConfig,
        engines: Sequence[TimedEngine],
        links: Sequence[Link],
        *,
        schedule: Schedule | None = None,
        seed: int = 0,
        trace: bool = False,
    ) -> None:
        self.config = config
        self.now_s = 0.0
        self.log: list[str] = []
        self.outcomes: dict[str, Outcome] = {}
        self.probes: list[Probed] = []
        self.broken: list[RingBroken] = []
        self.sent: list[tuple[float, int, Envelope]] = []
        """Every message put on a lane: when, by which stage, what (with `trace`)."""
        self.watch: Callable[[World], None] | None = None
        """Called after every step: the place for invariants."""
        self.told: Callable[[HeadEvent], None] | None = None
        """Called with every event of a request: the place for users who go on."""
        self.head = Head(config, schedule)
        self.links = list(links)
        self.stages = [Stage(index, config.num_stages) for index in range(1, config.num_stages)]
        machines: list[Head | Stage] = [self.head, *self.stages]
        self.nodes = [
            Node(index, machine, engine) for index, (machine, engine) in enumerate(zip(machines, engines, strict=True))
        ]
        self.cut: set[int] = set()
        """Links (by the stage that sends) that lose everything."""
        self._links_made = 1
        self._trace = trace
        self._random = Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._line_free_s: dict[tuple[int, str], float] = {}
        self._last_delivery_s: dict[tuple[int, str], float] = {}

    # what a scenario says

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

    def measured(self, told: RingMeasured) -> None:
        """Tell the head what the stages measured at load."""
        self._input(told, None)

    def lose_link(self, stage: int, *, tell_head: bool = True) -> None:
        """Cut the link that `stage` sends on; the head is told where it can be."""
        self.cut.add(stage)
        self._log("--", lambda: f"link {stage}>{self._next(stage)} is lost")
        if tell_head:
            self.inject(0, Envelope("tok", Broken(stage)))

    def relink(self) -> None:
        """Link the ring anew and probe it: what still travels belongs to the links that were."""
        self.cut.clear()
        self._links_made += 1
        self._log("--", lambda: "the ring is linked anew")
        self.probe(self._links_made)

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
                tail = "\n".join(self.log[-LOG_TAIL:])
                raise AssertionError(f"the ring does not come to rest; its last lines:\n{tail}")

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
        for node in self.nodes:
            self._arm_timer(node)
        if self.watch is not None:
            self.watch(self)

    def _arm_timer(self, node: Node) -> None:
        """Wake a stage at its deadline, as its loop's patience does; a busy one looks at it when it is done."""
        if node.busy or node.hung:
            return
        deadline_s = node.machine.next_timer()
        if deadline_s is not None and (node.timer_s is None or deadline_s < node.timer_s):
            node.timer_s = deadline_s
            self._at(deadline_s, partial(self._fire_timer, node))

    def _fire_timer(self, node: Node) -> None:
        node.timer_s = None
        self._turn(node)

    def _deliver(self, stage: int, message: HeadInput) -> None:
        if isinstance(message, Open):
            opened = message
            self._log("0", lambda: f"open {opened.request}: {len(opened.prompt)} tokens")
        elif isinstance(message, Cancel):
            cancel = message
            self._log("0", lambda: f"cancel {cancel.request} ({cancel.reason})")
        node = self.nodes[stage]
        node.inbox.append((self.now_s, message))
        self._turn(node)

    def _take(self, node: Node) -> list[tuple[float, HeadInput]]:
        """What the worker's loop hands its machine now: everything that arrived."""
        taken = list(node.inbox)
        node.inbox.clear()
        return taken

    def _turn(self, node: Node) -> None:
        """One round of the worker's loop; while a step runs, inputs wait."""
        if node.hung or (node.busy and not node.listens):
            return
        for arrived_s, message in self._take(node):
            node.machine.receive(message, arrived_s)  # type: ignore[arg-type]  # a stage gets envelopes only
        if node.listens:
            self._hand_out(node)
            return
        node.machine.handle_timer(self.now_s)
        self._flush(node)
        work = node.machine.next_work(self.now_s)
        self._flush(node)
        if work is not None:
            self._start(node, work)

    def _start(self, node: Node, work: Work) -> None:
        result, took_s = self._run(node, work), node.engine.took_s
        node.busy, node.listens = True, isinstance(work, PieceWork)
        node.busy_s += took_s
        self._log(str(node.stage), lambda: work_text(work, took_s, result.failed))
        self._at(self.now_s + took_s, lambda: self._complete(node, work, replace(result, compute_ms=took_s * 1e3)))

    def _run(self, node: Node, work: Work) -> WorkResult:
        """The forward; a world whose engines can fail runs it as the worker does."""
        return node.engine.run(work)

    def _complete(self, node: Node, work: Work, result: WorkResult) -> None:
        node.busy = node.listens = False
        node.machine.complete(work, result, self.now_s)
        self._flush(node)
        self._turn(node)

    def _flush(self, node: Node) -> None:
        for session in node.machine.freed():
            self._free(node, session)
        self._hand_out(node)

    def _hand_out(self, node: Node) -> None:
        for envelope in node.machine.outgoing():
            self._send(node.stage, envelope)
        if isinstance(node.machine, Head):
            for event in node.machine.events():
                self._happened(event)

    def _free(self, node: Node, session: SessionId) -> None:
        node.engine.free(session)

    def _send(self, stage: int, envelope: Envelope) -> None:
        self._log(f"{stage}>{self._next(stage)}", lambda: f"{envelope.lane:3} {message_text(envelope.message)}")
        if self._trace:
            self.sent.append((self.now_s, stage, envelope))
        if stage not in self.cut:
            due_s, made = self._due_s(stage, envelope), self._links_made
            self._at(due_s, lambda: self._arrive(stage, envelope, made))

    def _arrive(self, stage: int, envelope: Envelope, made: int) -> None:
        if stage not in self.cut and made == self._links_made:
            self._deliver(self._next(stage), envelope)

    def _due_s(self, stage: int, envelope: Envelope) -> float:
        """When the message arrives: behind what its lane still has to send, and in order."""
        link, lane = self.links[stage], (stage, envelope.lane)
        transfer_s = link.transfer_s(_bytes(envelope), envelope.lane)
        free_s = max(self.now_s, self._line_free_s.get(lane, 0.0)) + transfer_s
        self._line_free_s[lane] = free_s
        due_s = free_s + link.latency_s + (link.jitter_s * self._random.random() if link.jitter_s else 0.0)
        due_s = self._last_delivery_s[lane] = max(due_s, self._last_delivery_s.get(lane, 0.0))
        return due_s

    def _happened(self, event: HeadEvent) -> None:
        self._log("**", lambda: event_text(event))
        if isinstance(event, Probed):
            self.probes.append(event)
            return
        if isinstance(event, RingBroken):
            self.broken.append(event)
            return
        self.outcomes[event.request].events.append((self.now_s, event))
        if self.told is not None:
            self.told(event)

    def _next(self, stage: int) -> int:
        return (stage + 1) % self.config.num_stages

    def _log(self, where: str, what: Callable[[], str]) -> None:
        if self._trace:
            self.log.append(f"{self.now_s * 1e3:9.1f} ms  {where:4} {what()}")


def _bytes(envelope: Envelope) -> int:
    message = envelope.message
    return len(message.hidden.data) if isinstance(message, Piece | Group) else 0
