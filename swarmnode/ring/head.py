"""Stage 0's scheduler: admits sessions, decides what goes round the ring next, and ends them.

The head alone decides; every later stage does what frames say. Its inputs are `Open`, `Cancel`, `StartProbe` and the
envelopes of lane `tok`; its effects are envelopes on `act` and `pre`, events for the requests, and work for stage 0's
engine. A ring of one stage hands its answers to itself: the engine's result already holds the tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swarmnode.ids import RequestId, SessionId
from swarmnode.ring.kv_budget import GROWTH_TOKENS, TYPICAL_TOKENS, KvBudget
from swarmnode.ring.messages import (
    Broken,
    End,
    Ended,
    Envelope,
    Failed,
    Group,
    Piece,
    PieceDone,
    Probe,
    Row,
    Tokens,
)
from swarmnode.ring.progress import END_SLACK, ProgressDeadline
from swarmnode.ring.session import Phase, Session
from swarmnode.ring.work import DecodeRow, GroupWork, PieceWork, Sampling, Work, WorkResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from swarmnode.ring.work import Activation


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What the load decided for this ring. `max_group` 0: as large as the groups' rule makes it."""

    num_stages: int
    context_tokens: int
    """Longest conversation one session may reach: prompt and reply together."""
    kv_tokens: int
    """Tokens all sessions may hold together: the smallest budget of all stages."""
    max_in_flight: int
    max_waiting: int
    eos_token_ids: frozenset[int]
    prefill_chunk: int = 256
    """Prompt positions per piece; 0 sends prompts whole."""
    max_group: int = 0
    typical_tokens: int = TYPICAL_TOKENS


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
    """Send a throwaway message round both lanes; `Probed` follows when it came back on each."""

    nonce: int


HeadInput = Open | Cancel | StartProbe | Envelope


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


HeadEvent = Accepted | Started | Sampled | Finished | Refused | Probed


@dataclass(slots=True)
class _ProbeUnderWay:
    started_s: float
    missing: set[str] = field(default_factory=lambda: {"act", "pre"})


class Head:
    """A `Machine[HeadInput, Envelope, HeadEvent]` that also plans stage 0's compute; see the module docstring."""

    def __init__(self, config: HeadConfig) -> None:
        self.config = config
        self.budget = KvBudget(config.kv_tokens)
        self.progress = ProgressDeadline()
        self._sessions: dict[SessionId, Session] = {}
        self._by_request: dict[RequestId, Session] = {}
        self._waiting: deque[Session] = deque()
        self._prefilling: deque[Session] = deque()
        self._last_work_was_piece = False
        self._next_id = 1
        self._broken = False
        self._probes: dict[int, _ProbeUnderWay] = {}
        self._outgoing: list[Envelope] = []
        self._events: list[HeadEvent] = []
        self._freed: list[SessionId] = []

    # inputs

    def receive(self, message: HeadInput, now: float) -> None:
        match message:
            case Open():
                self._open(message, now)
            case Cancel(request=request, reason=reason):
                if session := self._by_request.get(request):
                    self._finish(session, reason, now)
                    self._admit(now)
            case StartProbe(nonce=nonce):
                self._start_probe(nonce, now)
            case Envelope(message=inner):
                self._receive_answer(inner, now)

    def handle_timer(self, now: float) -> None:
        limit_s = self._limit_s()
        for session in list(self._sessions.values()):
            deadline_s = self._deadline_s(session, limit_s)
            if deadline_s is None or now < deadline_s:
                continue
            if session.phase is Phase.ENDING:
                self._break(f"the end of a request did not come round the ring for {END_SLACK * limit_s:.0f} s", now)
                return
            self._refuse(session, "stalled", f"no stage answered for {limit_s:.0f} s; try again", now)
        self._admit(now)

    def next_timer(self) -> float | None:
        limit_s = self._limit_s()
        deadlines = (self._deadline_s(session, limit_s) for session in self._sessions.values())
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def _limit_s(self) -> float:
        return self.progress.limit_s(pieces_in_flight=self._pieces_in_flight() > 0)

    def _deadline_s(self, session: Session, limit_s: float) -> float | None:
        """When the session counts as stalled; None while nothing of it is under way."""
        if session.phase is Phase.ENDING:
            return session.progress_s + END_SLACK * limit_s
        return session.progress_s + limit_s if session.in_flight else None

    # effects

    def outgoing(self) -> list[Envelope]:
        drained, self._outgoing = self._outgoing, []
        return drained

    def events(self) -> list[HeadEvent]:
        drained, self._events = self._events, []
        return drained

    def freed(self) -> list[SessionId]:
        """Sessions whose cache on this stage must go before any further work is run."""
        drained, self._freed = self._freed, []
        return drained

    def snapshot(self) -> dict[str, Any]:
        """Gauges: requests waiting and running, sessions still ending, tokens reserved and in all."""
        phases = [s.phase for s in self._sessions.values()]
        return {
            "sessions": len(self._sessions),
            "waiting": len(self._waiting),
            "running": sum(p in (Phase.PREFILL, Phase.DECODE) for p in phases),
            "ending": phases.count(Phase.ENDING),
            "kv_reserved_tokens": self.budget.used_tokens,
            "kv_budget_tokens": self.budget.total_tokens,
        }

    # requests

    def _open(self, request: Open, now: float) -> None:
        explicit = request.max_new_tokens is not None
        room = self.config.context_tokens - len(request.prompt)
        session = Session(
            id=SessionId(self._next_id),
            request=request.request,
            prompt=request.prompt,
            max_new_tokens=request.max_new_tokens if request.max_new_tokens is not None else room,
            explicit_max=explicit,
            sampling=request.sampling,
            opened_s=now,
        )
        error = self._why_not(session)
        if error is not None:
            self._events.append(Refused(request.request, *error))
            return
        self._next_id += 1
        self._sessions[session.id] = session
        self._by_request[session.request] = session
        self._waiting.append(session)
        self._events.append(Accepted(session.request, len(session.prompt)))
        self._admit(now)

    def _why_not(self, session: Session) -> tuple[str, str] | None:
        """The error of a request that is refused at the door, as (code, message)."""
        prompt, limit = len(session.prompt), min(self.config.context_tokens, self.budget.total_tokens)
        wanted = session.max_new_tokens if session.explicit_max else 1
        if self._broken:
            return "stage_lost", "a stage of this model was lost; load it again"
        if prompt + wanted > limit:
            reply = f" + {wanted:,} of max_tokens" if session.explicit_max else " and its reply"
            return (
                "context_too_long",
                f"this conversation needs {prompt + wanted:,} tokens ({prompt:,} of prompt{reply}); "
                f"the ring serving this model holds {limit:,}",
            )
        if len(self._waiting) >= self.config.max_waiting and (self._waiting or not self._can_start(session)):
            return "overloaded", f"{len(self._waiting)} requests are already waiting; try again later"
        return None

    def _can_start(self, session: Session) -> bool:
        """Whether the first in line may start now."""
        running = sum(s.phase in (Phase.PREFILL, Phase.DECODE) for s in self._sessions.values())
        free = self.budget.free_tokens
        return running < self.config.max_in_flight and self._first_reservation(session) <= free

    def _admit(self, now: float) -> None:
        """Start waiting sessions in order while the budget and the in-flight limit allow."""
        while self._waiting and self._can_start(self._waiting[0]):
            session = self._waiting.popleft()
            self.budget.reserve(session.id, self._first_reservation(session))
            session.phase = Phase.PREFILL
            session.started_s = session.progress_s = session.ready_s = now
            self._prefilling.append(session)
            self._events.append(Started(session.request))

    def _first_reservation(self, session: Session) -> int:
        reply = session.max_new_tokens
        if not session.explicit_max:
            reply = min(reply, self.config.typical_tokens)
        return min(len(session.prompt) + reply, self.budget.total_tokens)

    # work

    def next_work(self, now: float) -> Work | None:
        """What stage 0 computes next: groups and pieces take turns, so neither waits for more than one of the other."""
        if self._last_work_was_piece:
            work = self._next_group(now) or self._next_piece(now)
        else:
            work = self._next_piece(now) or self._next_group(now)
        self._last_work_was_piece = isinstance(work, PieceWork)
        return work

    def _next_piece(self, now: float) -> PieceWork | None:
        """The next prompt piece, sessions in turn, at most one piece per stage in the ring at once."""
        if not self._prefilling or self._pieces_in_flight() >= self.config.num_stages:
            return None
        session = self._prefilling.popleft()
        chunk = self.config.prefill_chunk or len(session.prompt)
        end = min(session.next_piece + chunk, len(session.prompt))
        work = PieceWork(
            session=session.id,
            pos=session.next_piece,
            ids=session.prompt[session.next_piece : end],
            last=end == len(session.prompt),
            sampling=session.sampling if session.next_piece == 0 else None,
        )
        session.next_piece = end
        if session.pieces_in_flight == 0:
            session.progress_s = now  # waiting for its turn at stage 0 is no stage's silence
        session.pieces_in_flight += 1
        session.step_started_s = now
        if not work.last:
            self._prefilling.append(session)
        return work

    def _next_group(self, now: float) -> GroupWork | None:
        """One position of the sessions whose token came back, split so that every stage has a group to run."""
        decoding = [s for s in self._sessions.values() if s.phase is Phase.DECODE]
        ready = sorted((s for s in decoding if s.last_token is not None), key=lambda s: s.ready_s)
        if not ready:
            return None
        size = -(-len(decoding) // self.config.num_stages)
        if self.config.max_group:
            size = min(size, self.config.max_group)
        rows = []
        for session in ready[:size]:
            rows.append(DecodeRow(session.id, session.length, session.last_token))
            session.last_token = None
            session.step_started_s = session.progress_s = now
        return GroupWork(tuple(rows))

    def complete(self, work: Work, result: WorkResult, now: float) -> None:
        """Take the engine's result: send it on, or in a ring of one treat it as the answer."""
        for session_id, failure in result.failed.items():
            if session := self._alive(session_id):
                self._refuse(session, failure.code, failure.message, now)
        compute_ms = (result.compute_ms,)
        if isinstance(work, PieceWork):
            if session := self._alive(work.session):
                self._piece_computed(session, work, result, compute_ms, now)
        else:
            rows = [Row(r.session, self._gen(r.session), r.pos) for r in work.rows if r.session not in result.failed]
            self._group_computed(rows, result, compute_ms, now)
        self._admit(now)

    def _piece_computed(
        self, session: Session, work: PieceWork, result: WorkResult, compute_ms: tuple[float, ...], now: float
    ) -> None:
        if self.config.num_stages == 1:
            token = result.tokens[0] if result.tokens else None
            self._piece_done(PieceDone(session.id, session.gen, work.pos, len(work.ids), token, compute_ms), now)
            return
        piece = Piece(
            session=session.id,
            gen=session.gen,
            pos=work.pos,
            ids=work.ids,
            last=work.last,
            hidden=_required(result.hidden),
            sampling=work.sampling,
            compute_ms=compute_ms,
        )
        self._outgoing.append(Envelope("pre", piece))

    def _group_computed(self, rows: list[Row], result: WorkResult, compute_ms: tuple[float, ...], now: float) -> None:
        if self.config.num_stages == 1:
            self._tokens(Tokens(tuple(rows), result.tokens, compute_ms), now)
            return
        alive = [i for i, row in enumerate(rows) if self._alive(row.session)]
        if not alive:
            return
        hidden = _required(result.hidden).take_rows(alive)
        for i in alive:
            self._sessions[rows[i].session].hidden_bytes += len(hidden.data) // len(alive)
        self._outgoing.append(Envelope("act", Group(tuple(rows[i] for i in alive), hidden, compute_ms)))

    # answers

    def _receive_answer(self, message: object, now: float) -> None:
        match message:
            case PieceDone():
                self._piece_done(message, now)
            case Tokens():
                self._tokens(message, now)
            case Failed(session=session_id, gen=gen, code=code, message=text):
                if (session := self._alive(session_id)) and session.gen == gen:
                    self._refuse(session, code, text, now)
            case Ended(session=session_id):
                self._ended(session_id)
            case Probe(nonce=nonce, lane=lane):
                self._probe_returned(nonce, lane, now)
            case Broken(stage=stage):
                self._break(f"stage {stage} lost its neighbour", now)
        self._admit(now)

    def _piece_done(self, answer: PieceDone, now: float) -> None:
        session = self._alive(answer.session)
        if session is None or session.gen != answer.gen or session.phase is not Phase.PREFILL:
            return
        if answer.pos != session.answered:
            return
        session.answered += answer.n
        session.pieces_in_flight -= 1
        self.progress.observe(now - session.progress_s)
        session.progress_s = now
        if answer.token is not None:
            session.phase = Phase.DECODE
            session.first_token_s = now
            self._take_token(session, answer.token, now)

    def _tokens(self, answer: Tokens, now: float) -> None:
        for row, token in zip(answer.rows, answer.tokens, strict=True):
            session = self._alive(row.session)
            if session is None or session.gen != row.gen or row.pos != session.length or not session.in_flight:
                continue
            wall_s = now - session.step_started_s
            waited_s = session.step_started_s - session.ready_s
            session.times.add(wall_s * 1e3, answer.compute_ms, answer.queue_ms, waited_s * 1e3)
            self.progress.observe(wall_s)
            self._take_token(session, token, now)

    def _take_token(self, session: Session, token: int, now: float) -> None:
        session.generated += 1
        session.last_token = token
        session.ready_s = session.progress_s = now
        self._events.append(Sampled(session.request, token))
        if token in self.config.eos_token_ids:
            self._finish(session, "stop", now)
        elif session.generated >= session.max_new_tokens or not self._grow(session):
            self._finish(session, "length", now)

    def _grow(self, session: Session) -> bool:
        """Keep room for the next position; a reply without max_tokens grows its reservation as it goes."""
        needed = len(session.prompt) + session.generated + 1
        if needed <= self.budget.held_by(session.id):
            return True
        held, free = self.budget.held_by(session.id), self.budget.free_tokens
        wanted = min(needed + GROWTH_TOKENS, len(session.prompt) + session.max_new_tokens, held + free)
        return needed <= wanted and self.budget.reserve(session.id, wanted)

    # ends

    def _finish(self, session: Session, reason: str, now: float) -> None:
        self._events.append(Finished(session.request, reason, len(session.prompt), session.generated, session.timing()))
        self._end(session, now)

    def _refuse(self, session: Session, code: str, message: str, now: float) -> None:
        self._events.append(Refused(session.request, code, message))
        self._end(session, now)

    def _end(self, session: Session, now: float) -> None:
        """Free it here and tell every stage; its reservation stays until `Ended` comes back from the last one."""
        del self._by_request[session.request]
        if session.phase is Phase.WAITING:
            self._waiting.remove(session)
            del self._sessions[session.id]
            return
        if session in self._prefilling:
            self._prefilling.remove(session)
        session.phase, session.progress_s = Phase.ENDING, now
        session.pieces_in_flight = 0
        self._freed.append(session.id)
        if self.config.num_stages == 1 or self._broken:
            self._ended(session.id)
        else:
            self._outgoing += [Envelope("act", End(session.id)), Envelope("pre", End(session.id))]

    def _ended(self, session_id: SessionId) -> None:
        session = self._sessions.get(session_id)
        if session is not None and session.phase is Phase.ENDING:
            del self._sessions[session_id]
            self.budget.release(session_id)

    def _break(self, why: str, now: float) -> None:
        """The ring is lost: every session ends now, and nothing more is sent."""
        if self._broken:
            return
        self._broken = True
        for session in self._active():
            self._refuse(session, "stage_lost", f"{why}; load the model again", now)
        for session_id in [s.id for s in self._sessions.values()]:
            self._ended(session_id)
        self._probes.clear()
        self._outgoing.clear()

    # probes

    def _start_probe(self, nonce: int, now: float) -> None:
        if self.config.num_stages == 1:
            self._events.append(Probed(nonce, 0.0))
            return
        self._probes[nonce] = _ProbeUnderWay(now)
        self._outgoing += [Envelope(lane, Probe(nonce, lane)) for lane in ("act", "pre")]

    def _probe_returned(self, nonce: int, lane: str, now: float) -> None:
        probe = self._probes.get(nonce)
        if probe is None:
            return
        probe.missing.discard(lane)
        if not probe.missing:
            del self._probes[nonce]
            self._events.append(Probed(nonce, (now - probe.started_s) * 1e3))

    # look-ups

    def _pieces_in_flight(self) -> int:
        return sum(session.pieces_in_flight for session in self._sessions.values())

    def _active(self) -> Iterable[Session]:
        return [s for s in self._sessions.values() if s.phase is not Phase.ENDING]

    def _alive(self, session_id: SessionId) -> Session | None:
        session = self._sessions.get(session_id)
        return session if session is not None and session.phase is not Phase.ENDING else None

    def _gen(self, session_id: SessionId) -> int:
        session = self._sessions.get(session_id)
        return session.gen if session is not None else 0


def _required(hidden: Activation | None) -> Activation:
    """Every stage but the last returns hidden states; an engine that does not is a bug, not a session's fault."""
    if hidden is None:
        raise RuntimeError("the engine of a stage that is not the last returned no hidden states")
    return hidden
