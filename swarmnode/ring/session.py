"""One conversation as the head sees it: its prompt, how far it is, what it cost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from swarmnode.ring.work import Continuation, DecodeRow, PieceWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.ids import RequestId, SessionId
    from swarmnode.ring.parking import Parked
    from swarmnode.ring.work import Sampling


class Phase(Enum):
    """waiting → prefill → decode; a paused one comes back to prefill. Who has ended is in `Leaving`."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"


@dataclass(slots=True)
class StepTimes:
    """Sums over a session's decode steps, in milliseconds; link time is what compute and queues do not explain."""

    stage_ms: list[float] = field(default_factory=list)
    link_ms: float = 0.0
    queue_ms: float = 0.0
    steps: int = 0

    def add(self, wall_ms: float, compute_ms: Sequence[float], queue_ms: float, waited_ms: float) -> None:
        """Count one step: `wall_ms` from its start on stage 0 to its token, `waited_ms` at stage 0 before it."""
        if len(self.stage_ms) < len(compute_ms):
            self.stage_ms += [0.0] * (len(compute_ms) - len(self.stage_ms))
        for stage, ms in enumerate(compute_ms):
            self.stage_ms[stage] += ms
        self.link_ms += max(0.0, wall_ms - sum(compute_ms) - queue_ms)
        self.queue_ms += queue_ms + waited_ms
        self.steps += 1

    def averages(self) -> dict[str, float]:
        """Mean milliseconds a token: stage0_ms, stage1_ms, …, link_ms, queue_ms."""
        if not self.steps:
            return {}
        means = {f"stage{i}_ms": total / self.steps for i, total in enumerate(self.stage_ms)}
        return means | {"link_ms": self.link_ms / self.steps, "queue_ms": self.queue_ms / self.steps}


@dataclass(frozen=True, slots=True)
class PieceUnderWay:
    """A piece that was handed to stage 0 and has not come back."""

    pos: int
    n: int
    started_s: float


@dataclass(slots=True)
class Session:
    """Mutable state of one session; only `Head` changes it."""

    id: SessionId
    request: RequestId
    prompt: tuple[int, ...]
    max_new_tokens: int
    explicit_max: bool
    sampling: Sampling
    opened_s: float
    gen: int = 0
    phase: Phase = Phase.WAITING
    reading: tuple[int, ...] = ()
    """What goes round in pieces: the prompt; after a pause all tokens there are."""
    next_piece: int = 0
    """First position of `reading` not yet run on stage 0."""
    start: Continuation | None = None
    """The parked conversation it continues, until its first piece came back."""
    source: Parked | None = None
    cached_tokens: int = 0
    pieces: deque[PieceUnderWay] = field(default_factory=deque)
    """In the ring, in order; answers come back in the same order."""
    reply: list[int] = field(default_factory=list)
    wants_room: bool = False
    """Its next position has no room yet: it does not step."""
    group: int = 0
    """Names the group its last step went round with."""
    group_rows: int = 0
    """How many sessions that group had when it was begun."""
    last_token: int | None = None
    """Set while the session is ready for its next decode step; None while a step is in flight."""
    ready_s: float = 0.0
    step_started_s: float = 0.0
    progress_s: float = 0.0
    """When something of this session last came back; what the progress deadline counts from."""
    started_s: float = 0.0
    first_token_s: float | None = None
    hidden_bytes: int = 0
    """Bytes of hidden state its decode steps sent on stage 0's link."""
    times: StepTimes = field(default_factory=StepTimes)

    @property
    def generated(self) -> int:
        return len(self.reply)

    @property
    def length(self) -> int:
        """Positions all stages' caches hold once the step in flight is done (the last sampled token has no KV)."""
        return len(self.prompt) + max(0, self.generated - 1)

    @property
    def confirmed(self) -> int:
        """Positions that every stage holds: answers came back for them."""
        if self.phase is Phase.DECODE:
            return self.length
        if self.phase is not Phase.PREFILL or self.start is not None:
            return 0
        return self.pieces[0].pos if self.pieces else self.next_piece

    @property
    def sent(self) -> int:
        """Positions that some stage may hold."""
        return self.next_piece if self.phase is Phase.PREFILL else self.length + self.in_flight

    @property
    def needed_tokens(self) -> int:
        """Its next position included."""
        return len(self.prompt) + self.generated + 1

    @property
    def longest_tokens(self) -> int:
        return len(self.prompt) + self.max_new_tokens

    @property
    def in_flight(self) -> bool:
        """Something of it is travelling round the ring."""
        if self.phase is Phase.PREFILL:
            return bool(self.pieces)
        return self.phase is Phase.DECODE and self.last_token is None

    def begin(self, now: float, start: Continuation | None = None, source: Parked | None = None) -> None:
        """Read the prompt from now on, behind what it shares with a parked conversation."""
        self.start, self.source = start, source
        self.cached_tokens = start.length if start is not None else 0
        self.started_s = now
        self._read(self.prompt, self.cached_tokens, now)

    def pause(self) -> None:
        """What still travels of it belongs to a past generation."""
        self.phase, self.gen = Phase.PAUSED, self.gen + 1
        self.pieces.clear()
        self.last_token, self.wants_room = None, False

    def resume(self, now: float) -> None:
        """Read all its tokens again: the answer to the last of them is the next token, as if nothing had been."""
        self._read(self.prompt + tuple(self.reply), 0, now)

    def _read(self, tokens: tuple[int, ...], begin: int, now: float) -> None:
        self.phase, self.reading, self.next_piece = Phase.PREFILL, tokens, begin
        self.progress_s = self.ready_s = now

    def take_piece(self, n: int, now: float) -> PieceWork:
        """The next `n` positions of what it reads as work; from now on they are under way."""
        pos = self.next_piece
        is_first = pos == (self.start.length if self.start is not None else 0)
        self.next_piece = pos + n
        if not self.pieces:
            self.progress_s = now  # waiting for its turn at stage 0 is no stage's silence
        self.pieces.append(PieceUnderWay(pos, n, now))
        self.step_started_s = now
        return PieceWork(
            session=self.id,
            pos=pos,
            ids=self.reading[pos : pos + n],
            last=self.next_piece == len(self.reading),
            sampling=self.sampling if is_first else None,
            start=self.start if is_first else None,
        )

    def take_step(self, group: int, rows: int, now: float) -> DecodeRow:
        """Its next position as one of the `rows` of group `group`; from now on it is under way."""
        row = DecodeRow(self.id, self.length, self.last_token)
        self.last_token = None
        self.group, self.group_rows = group, rows
        self.step_started_s = self.progress_s = now
        return row

    def step_came_back(self, compute_ms: Sequence[float], queue_ms: float, now: float) -> float:
        """Count the step; the seconds it was under way."""
        wall_s, waited_s = now - self.step_started_s, self.step_started_s - self.ready_s
        self.times.add(wall_s * 1e3, compute_ms, queue_ms, waited_s * 1e3)
        return wall_s

    def timing(self) -> dict[str, Any]:
        """`swarm.timing` of the reply (milliseconds, averaged per token where it is a step's)."""
        timing: dict[str, Any] = {k: round(v, 3) for k, v in self.times.averages().items()}
        if self.first_token_s is not None:
            timing["prefill_ms"] = round((self.first_token_s - self.started_s) * 1e3, 3)
            timing["wait_ms"] = round((self.started_s - self.opened_s) * 1e3, 3)
        steps = self.times.steps
        timing["bytes_per_token"] = self.hidden_bytes // steps if steps else 0
        return timing
