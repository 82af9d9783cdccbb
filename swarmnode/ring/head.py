"""Stage 0's scheduler: admits sessions, decides what goes round the ring next, and ends them.

The head alone decides; every later stage does what frames say. Its inputs are `Open`, `Cancel`, `StartProbe` and the
envelopes of lane `tok`; its effects are envelopes on `act` and `pre`, events for the requests, and work for stage 0's
engine. A ring of one stage hands its answers to itself: the engine's result already holds the tokens.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from swarmnode.ids import RequestId, SessionId
from swarmnode.machine import drain
from swarmnode.ring.admission import Admission
from swarmnode.ring.cost_model import CostModel
from swarmnode.ring.cost_schedule import make_schedule
from swarmnode.ring.head_messages import (
    Accepted,
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
    Started,
    StartProbe,
)
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
from swarmnode.ring.probes import Probes
from swarmnode.ring.progress import END_SLACK, ProgressDeadline
from swarmnode.ring.session import Phase, Session
from swarmnode.ring.sessions import Sessions
from swarmnode.ring.turns import Turns
from swarmnode.ring.work import GroupWork, PieceWork, Work, WorkResult

if TYPE_CHECKING:
    from swarmnode.ring.head_config import HeadConfig
    from swarmnode.ring.schedule import Pass, Schedule
    from swarmnode.ring.work import Activation


class Head:
    """A `Machine[HeadInput, Envelope, HeadEvent]` that also plans stage 0's compute; see the module docstring."""

    def __init__(self, config: HeadConfig, schedule: Schedule | None = None) -> None:
        self.config = config
        self.costs = CostModel(config.num_stages)
        self.admission = Admission(config)
        self.progress = ProgressDeadline()
        self._schedule = schedule or make_schedule(config, self.costs)
        self._sessions = Sessions()
        self._by_request: dict[RequestId, Session] = {}
        self._prefilling: deque[Session] = deque()
        self._turns = Turns()
        self._next_id = 1
        self._next_group_id = 1
        self._bytes_per_position = 0
        self._broken = False
        self._probes = Probes()
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
            case RingMeasured():
                self._measured(message)
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
        return self.progress.limit_s(pieces_in_flight=self._sessions.reading)

    def _deadline_s(self, session: Session, limit_s: float) -> float | None:
        """When the session counts as stalled; None while nothing of it is under way."""
        if session.phase is Phase.ENDING:
            return session.progress_s + END_SLACK * limit_s
        return session.progress_s + limit_s if session.in_flight else None

    # effects

    def outgoing(self) -> list[Envelope]:
        return drain(self._outgoing)

    def events(self) -> list[HeadEvent]:
        return drain(self._events)

    def freed(self) -> list[SessionId]:
        """Sessions whose cache on this stage must go before any further work is run."""
        return drain(self._freed)

    def snapshot(self) -> dict[str, Any]:
        """Gauges: requests waiting and running, sessions still ending, tokens reserved and in all."""
        phases = [s.phase for s in self._sessions.values()]
        return {
            "sessions": len(self._sessions),
            "waiting": len(self.admission.waiting),
            "running": self._sessions.running,
            "ending": phases.count(Phase.ENDING),
            "kv_reserved_tokens": self.admission.budget.used_tokens,
            "kv_budget_tokens": self.admission.budget.total_tokens,
        }

    def _measured(self, ring: RingMeasured) -> None:
        self.admission.budget.total_tokens = ring.kv_tokens
        for stage, costs in enumerate(ring.costs):
            if costs is not None:
                self.costs.start(stage, costs)

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
        self.admission.waiting.append(session)
        self._events.append(Accepted(session.request, len(session.prompt)))
        self._admit(now)

    def _why_not(self, session: Session) -> tuple[str, str] | None:
        """The error of a request that is refused at the door, as (code, message)."""
        if self._broken:
            return "stage_lost", "a stage of this model was lost; load it again"
        return self.admission.why_not(session, self._sessions.running)

    def _admit(self, now: float) -> None:
        """Start waiting sessions in order while the budget and the in-flight limit allow."""
        while (session := self.admission.next_start(self._sessions.running)) is not None:
            session.started_s = session.progress_s = session.ready_s = now
            self._prefilling.append(session)
            self._events.append(Started(session.request))

    # work

    def next_work(self, now: float) -> Work | None:
        """What stage 0 computes next: a piece, unless a step goes first."""
        chosen = self._sessions.pass_now(self._bytes_per_position)
        if any(self._turns.step_goes_first((s.id,), s.delayed) for s in self._sessions.ready()):
            return self._next_group(chosen, now) or self._next_piece(chosen, now)
        return self._next_piece(chosen, now) or self._next_group(chosen, now)

    def _next_piece(self, chosen: Pass, now: float) -> PieceWork | None:
        """The next prompt piece, sessions in turn."""
        if not self._prefilling:
            return None
        session = self._prefilling[0]
        n = self._schedule.piece_positions(chosen, len(session.prompt) - session.next_piece)
        if n == 0:
            return None
        self._prefilling.popleft()
        work = session.take_piece(n, now)
        if not work.last:
            self._prefilling.append(session)
        self._turns.piece_begins()
        for other in self._sessions.ready():
            other.delayed = True
        return work

    def _next_group(self, chosen: Pass, now: float) -> GroupWork | None:
        """One position of the sessions that have waited longest for theirs."""
        if not chosen.ready:
            return None
        rows = self._schedule.group_rows(chosen)
        ready = sorted(self._sessions.ready(), key=lambda s: s.ready_s)[:rows]
        if not ready:
            return None
        self._next_group_id += 1
        self._turns.step_begins([session.id for session in ready])
        return GroupWork(tuple(session.take_step(self._next_group_id, now) for session in ready))

    def complete(self, work: Work, result: WorkResult, now: float) -> None:
        """Take the engine's result: send it on, or in a ring of one treat it as the answer."""
        for session_id, failure in result.failed.items():
            if session := self._sessions.alive(session_id):
                self._refuse(session, failure.code, failure.message, now)
        compute_ms = (result.compute_ms,)
        if isinstance(work, PieceWork):
            self._turns.piece_ended(result.compute_ms, now)
            if session := self._sessions.alive(work.session):
                self._piece_computed(session, work, result, compute_ms, now)
        else:
            self._turns.step_ended(result.compute_ms)
            done = [row for row in work.rows if row.session not in result.failed]
            rows = [Row(row.session, self._sessions.gen(row.session), row.pos) for row in done]
            self._group_computed(rows, result, compute_ms, now)
        self._admit(now)

    def _piece_computed(
        self, session: Session, work: PieceWork, result: WorkResult, compute_ms: tuple[float, ...], now: float
    ) -> None:
        if self.config.num_stages == 1:
            token = result.tokens[0] if result.tokens else None
            self._piece_done(PieceDone(session.id, session.gen, work.pos, len(work.ids), token, compute_ms), now)
            return
        hidden = _required(result.hidden)
        self._bytes_per_position = len(hidden.data) // len(work.ids)
        piece = Piece(
            session=session.id,
            gen=session.gen,
            pos=work.pos,
            ids=work.ids,
            last=work.last,
            hidden=hidden,
            sampling=work.sampling,
            compute_ms=compute_ms,
        )
        self._outgoing.append(Envelope("pre", piece))

    def _group_computed(self, rows: list[Row], result: WorkResult, compute_ms: tuple[float, ...], now: float) -> None:
        if self.config.num_stages == 1:
            self._tokens(Tokens(tuple(rows), result.tokens, compute_ms), now)
            return
        alive = [i for i, row in enumerate(rows) if self._sessions.alive(row.session)]
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
                if (session := self._sessions.alive(session_id)) and session.gen == gen:
                    self._refuse(session, code, text, now)
            case Ended(session=session_id):
                self._ended(session_id)
            case Probe(nonce=nonce, lane=lane):
                self._probe_returned(nonce, lane, now)
            case Broken(stage=stage):
                self._break(f"stage {stage} lost its neighbour", now)
        self._admit(now)

    def _piece_done(self, answer: PieceDone, now: float) -> None:
        session = self._sessions.alive(answer.session)
        if session is None or session.gen != answer.gen or session.phase is not Phase.PREFILL:
            return
        if not session.pieces or answer.pos != session.pieces[0].pos:
            return
        piece = session.pieces.popleft()
        wall_ms = (now - piece.started_s) * 1e3
        self.costs.observe_piece(answer.n, answer.compute_ms, wall_ms - answer.queue_ms)
        self.progress.observe(now - session.progress_s)
        session.progress_s = now
        if answer.token is not None:
            session.phase = Phase.DECODE
            session.first_token_s = now
            self._take_token(session, answer.token, now)

    def _tokens(self, answer: Tokens, now: float) -> None:
        sent_s = [s.step_started_s for row in answer.rows if (s := self._sessions.alive(row.session)) and s.in_flight]
        if sent_s:
            wall_ms = (now - max(sent_s)) * 1e3
            self.costs.observe_group(len(answer.rows), answer.compute_ms, wall_ms - answer.queue_ms)
        for row, token in zip(answer.rows, answer.tokens, strict=True):
            session = self._sessions.alive(row.session)
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
        session.delayed = self._turns.arrived_during_piece(now)
        session.ready_s = session.progress_s = now
        self._events.append(Sampled(session.request, token))
        if token in self.config.eos_token_ids:
            self._finish(session, "stop", now)
        elif session.generated >= session.max_new_tokens or not self.admission.grow(session):
            self._finish(session, "length", now)

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
            self.admission.waiting.remove(session)
            del self._sessions[session.id]
            return
        if session in self._prefilling:
            self._prefilling.remove(session)
        session.phase, session.progress_s = Phase.ENDING, now
        session.pieces.clear()
        self._freed.append(session.id)
        if self.config.num_stages == 1 or self._broken:
            self._ended(session.id)
        else:
            self._outgoing += [Envelope("act", End(session.id)), Envelope("pre", End(session.id))]

    def _ended(self, session_id: SessionId) -> None:
        session = self._sessions.get(session_id)
        if session is not None and session.phase is Phase.ENDING:
            del self._sessions[session_id]
            self.admission.budget.release(session_id)

    def _break(self, why: str, now: float) -> None:
        """The ring is lost: every session ends now, and nothing more is sent."""
        if self._broken:
            return
        self._broken = True
        self._events.append(RingBroken(why))
        for session in self._sessions.active():
            self._refuse(session, "stage_lost", f"{why}; load the model again", now)
        for session_id in [s.id for s in self._sessions.values()]:
            self._ended(session_id)
        self._probes.forget()
        self._outgoing.clear()

    # probes

    def _start_probe(self, nonce: int, now: float) -> None:
        if self.config.num_stages == 1:
            self._events.append(Probed(nonce, 0.0))
            return
        self._outgoing += self._probes.start(nonce, now)

    def _probe_returned(self, nonce: int, lane: str, now: float) -> None:
        round_ms = self._probes.returned(nonce, lane, now)
        if round_ms is not None:
            self.costs.observe_road(round_ms)
            self._events.append(Probed(nonce, round_ms))


def _required(hidden: Activation | None) -> Activation:
    """Every stage but the last returns hidden states; an engine that does not is a bug, not a session's fault."""
    if hidden is None:
        raise RuntimeError("the engine of a stage that is not the last returned no hidden states")
    return hidden
