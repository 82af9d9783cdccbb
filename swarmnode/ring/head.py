"""Stage 0's scheduler: admits sessions, decides what goes round the ring next, and ends them.

The head alone decides; every later stage does what frames say. Its inputs are `Open`, `Cancel`, `StartProbe`,
`RingMeasured` and the envelopes of lane `tok`; its effects are envelopes on `act` and `pre`, events for the requests,
and work for stage 0's engine. A ring of one stage hands its answers to itself: the engine's result already holds the
tokens. Who gets the ring's memory is decided in `admission`, and given back through `caches`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from swarmnode.errors import CacheGap
from swarmnode.ids import RequestId, SessionId
from swarmnode.machine import drain
from swarmnode.ring.admission import Admission, CutShort, Evict, Pause, Resume, Start
from swarmnode.ring.caches import Caches
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
    Ended,
    Envelope,
    Failed,
    Group,
    Piece,
    PieceDone,
    Probe,
    Reset,
    Row,
    Tokens,
)
from swarmnode.ring.progress import END_SLACK, ProgressDeadline
from swarmnode.ring.relinking import Relinking
from swarmnode.ring.session import Phase, Session
from swarmnode.ring.sessions import Sessions
from swarmnode.ring.turn_plan import TurnPlan
from swarmnode.ring.work import PieceWork, Work, WorkResult

if TYPE_CHECKING:
    from swarmnode.ring.head_config import HeadConfig
    from swarmnode.ring.schedule import Schedule

RELINKING = "the ring is being linked anew; try again in a moment"
LOST = "stage_lost", f"a stage of this model was lost; {RELINKING}"


class Head:
    """A `Machine[HeadInput, Envelope, HeadEvent]` that also plans stage 0's compute; see the module docstring."""

    def __init__(self, config: HeadConfig, schedule: Schedule | None = None) -> None:
        self.config = config
        self.costs = CostModel(config.num_stages)
        self.admission = Admission(config)
        self.progress = ProgressDeadline()
        self._sessions = Sessions()
        self._by_request: dict[RequestId, Session] = {}
        self._plan = TurnPlan(schedule or make_schedule(config, self.costs), self._sessions, self.costs)
        self._next_id = 1
        self._relinking = Relinking()
        self._outgoing: list[Envelope] = []
        self._events: list[HeadEvent] = []
        self._freed: list[SessionId] = []
        self._gens: dict[SessionId, int] = {}
        """Of the sessions whose work stage 0 is running: it may have been paused since."""
        self._caches = Caches(config, self.admission, self._relinking, self._outgoing, self._freed)

    # inputs

    def receive(self, message: HeadInput, now: float) -> None:
        match message:
            case Open():
                self._open(message, now)
            case Cancel(request=request, reason=reason):
                if session := self._by_request.get(request):
                    self._finish(session, reason, now)
            case StartProbe(nonce=nonce):
                self._start_probe(nonce, now)
            case RingMeasured():
                self._measured(message)
            case Envelope(message=inner):
                self._receive_answer(inner, now)
        self._balance(now)

    def handle_timer(self, now: float) -> None:
        limit_s = self._limit_s()
        if now >= self._end_deadline_s(limit_s):
            self._break(f"the end of a request did not come round the ring for {END_SLACK * limit_s:.0f} s", now)
            return
        for session in self._sessions.in_flight():
            if now >= session.progress_s + limit_s:
                self._refuse(session, "stalled", f"no stage answered for {limit_s:.0f} s; try again", now)
        self._balance(now)

    def next_timer(self) -> float | None:
        limit_s = self._limit_s()
        first_s = min((session.progress_s + limit_s for session in self._sessions.in_flight()), default=math.inf)
        deadline_s = min(first_s, self._end_deadline_s(limit_s), self._plan.wakes_s or math.inf)
        return None if math.isinf(deadline_s) else deadline_s

    def _limit_s(self) -> float:
        return self.progress.limit_s(pieces_in_flight=self._sessions.reading)

    def _end_deadline_s(self, limit_s: float) -> float:
        return self.admission.leaving.oldest_s() + END_SLACK * limit_s

    # effects

    def outgoing(self) -> list[Envelope]:
        return drain(self._outgoing)

    def events(self) -> list[HeadEvent]:
        return drain(self._events)

    def freed(self) -> list[SessionId]:
        """Sessions whose cache on this stage must go before any further work is run."""
        return drain(self._freed)

    def snapshot(self) -> dict[str, Any]:
        """Gauges: sessions by what they do, conversations kept for later, and who holds the budget's tokens."""
        sessions = len(self._sessions) + len(self.admission.leaving)
        return {"sessions": sessions, "running": len(self._sessions.running()), **self.admission.gauges()}

    def _measured(self, ring: RingMeasured) -> None:
        self.admission.budget.total_tokens = ring.kv_tokens
        self.costs.unmeasured_rows = ring.max_group
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
        running = len(self._sessions.running())
        error = self.admission.why_not(session, running) if self._relinking.serving else LOST
        if error is not None:
            self._events.append(Refused(request.request, *error))
            return
        self._next_id += 1
        self._sessions[session.id] = session
        self._by_request[session.request] = session
        self.admission.waiting.append(session)
        self._events.append(Accepted(session.request, len(session.prompt)))

    # memory

    def _balance(self, now: float) -> None:
        """Let sessions grow, come back and start while there is room, and make room where it is due."""
        while self._relinking.serving:
            match self.admission.next_move(self._sessions.running()):
                case Start(session=session) as start:
                    self._caches.start(start, now)
                    self._plan.reads(session)
                    self._events.append(Started(session.request))
                case Resume(session=session):
                    session.resume(now)
                    self._plan.reads(session)
                case Evict(parked=parked):
                    self._caches.drop(parked, now)
                case Pause(session=session):
                    self._pause(session, now)
                case CutShort(session=session):
                    self._finish(session, "length", now)
                case None:
                    return

    def _pause(self, session: Session, now: float, *, lacking: bool = False) -> None:
        self._plan.forget(session)
        self._caches.pause(session, now, lacking=lacking)
        self.admission.paused.append(session)
        self.admission.pauses += 1
        self.admission.paused.sort(key=lambda paused: paused.id)

    # work

    def next_work(self, now: float) -> Work | None:
        """What stage 0 computes next."""
        work = self._plan.next_work(now)
        if work is not None:
            asked = [work.session] if isinstance(work, PieceWork) else [row.session for row in work.rows]
            self._gens = {session: self._sessions[session].gen for session in asked}
        return work

    def complete(self, work: Work, result: WorkResult, now: float) -> None:
        """Take the engine's result: send it on, or in a ring of one treat it as the answer."""
        gens = self._gens
        for session_id, failure in result.failed.items():
            self._failed(Failed(session_id, gens[session_id], failure.code, failure.message), now)
        compute_ms = (result.compute_ms,)
        if isinstance(work, PieceWork):
            if session := self._sessions.alive(work.session, gens[work.session]):
                self._piece_computed(session, work, result, compute_ms, now)
        else:
            slot = self._plan.step_ended([row.session for row in work.rows], now)
            done = [row for row in work.rows if row.session not in result.failed]
            rows = [Row(row.session, gens[row.session], row.pos) for row in done]
            self._group_computed(rows, result, compute_ms, slot, now)
        self._balance(now)

    def _piece_computed(
        self, session: Session, work: PieceWork, result: WorkResult, compute_ms: tuple[float, ...], now: float
    ) -> None:
        if self.config.num_stages == 1:
            token = result.tokens[0] if result.tokens else None
            self._piece_done(PieceDone(session.id, session.gen, work.pos, len(work.ids), token, compute_ms), now)
            return
        hidden = result.onward()
        self._plan.bytes_per_position = len(hidden.data) // len(work.ids)
        piece = Piece(
            session=session.id,
            gen=session.gen,
            pos=work.pos,
            ids=work.ids,
            last=work.last,
            hidden=hidden,
            sampling=work.sampling,
            compute_ms=compute_ms,
            start=work.start,
        )
        self._outgoing.append(Envelope("pre", piece))

    def _group_computed(
        self, rows: list[Row], result: WorkResult, compute_ms: tuple[float, ...], slot: bool, now: float
    ) -> None:
        if self.config.num_stages == 1:
            self._tokens(Tokens(tuple(rows), result.tokens, compute_ms), now)
            return
        alive = [i for i, row in enumerate(rows) if self._sessions.alive(row.session, row.gen)]
        if not alive:
            return
        hidden = result.onward().take_rows(alive)
        for i in alive:
            self._sessions[rows[i].session].hidden_bytes += len(hidden.data) // len(alive)
        group = Group(tuple(rows[i] for i in alive), hidden, compute_ms, round_ms=self._plan.round_ms, slot=slot)
        self._plan.turns.left([row.session for row in group.rows], self._plan.round_ms, compute_ms[0], now)
        self._outgoing.append(Envelope("act", group))

    # answers

    def _receive_answer(self, message: object, now: float) -> None:
        match message:
            case PieceDone():
                self._piece_done(message, now)
            case Tokens():
                self._tokens(message, now)
            case Failed():
                self._failed(message, now)
            case Ended(session=session_id, gen=gen):
                self._caches.left(session_id, gen, now)
            case Probe(nonce=nonce, lane=lane):
                if probed := self._relinking.probe_returned(nonce, lane, now):
                    self._probed(probed)
            case Reset(below=below, keep=keep):
                self._reset_returned(below, keep)
            case Broken(stage=stage):
                self._break(f"stage {stage} lost its neighbour", now)

    def _failed(self, failed: Failed, now: float) -> None:
        """A session that lacks only what it was to continue reads it all itself; any other ends."""
        self.admission.leaving.spoil(failed.session, failed.gen)
        session = self._sessions.alive(failed.session, failed.gen)
        if session is None:
            return
        if session.start is not None and failed.code == CacheGap.code:
            session.cached_tokens = 0
            self._pause(session, now, lacking=True)
        else:
            self._refuse(session, failed.code, failed.message, now)

    def _piece_done(self, answer: PieceDone, now: float) -> None:
        session = self._sessions.alive(answer.session, answer.gen)
        if session is None or session.phase is not Phase.PREFILL:
            return
        if not session.pieces or answer.pos != session.pieces[0].pos:
            return
        piece = session.pieces.popleft()
        wall_ms = (now - piece.started_s) * 1e3
        self.costs.observe_piece(answer.n, answer.compute_ms, wall_ms - answer.queue_ms)
        self._plan.piece_done(max(answer.compute_ms, default=math.inf))
        self.progress.observe(now - session.progress_s)
        session.progress_s = now
        self._caches.started(session, now)
        if answer.token is not None:
            session.phase = Phase.DECODE
            session.first_token_s = now if session.first_token_s is None else session.first_token_s
            self._take_token(session, answer.token, now)

    def _tokens(self, answer: Tokens, now: float) -> None:
        rows = [(row, self._sessions.alive(row.session, row.gen)) for row in answer.rows]
        sent = [session for _, session in rows if session is not None and session.in_flight]
        # what a group of all rows cost stage 0 says nothing of the fewer that came through
        if sent and len(rows) == sent[0].group_rows:
            wall_ms = (now - sent[0].step_started_s) * 1e3
            self.costs.observe_group(len(rows), answer.compute_ms, wall_ms - answer.queue_ms)
        for (row, session), token in zip(rows, answer.tokens, strict=True):
            if session is None or row.pos != session.length or not session.in_flight:
                continue
            self.progress.observe(session.step_came_back(answer.compute_ms, answer.queue_ms, now))
            self._take_token(session, token, now)

    def _take_token(self, session: Session, token: int, now: float) -> None:
        session.reply.append(token)
        session.last_token = token
        self._plan.turns.over(session.id)
        session.ready_s = session.progress_s = now
        self._events.append(Sampled(session.request, token))
        if token in self.config.eos_token_ids:
            self._finish(session, "stop", now)
        elif session.generated >= session.max_new_tokens:
            self._finish(session, "length", now)
        else:
            self.admission.grow(session)

    # ends

    def _finish(self, session: Session, reason: str, now: float) -> None:
        prompt, timing = len(session.prompt), session.timing()
        finished = Finished(session.request, reason, prompt, session.generated, timing, session.cached_tokens)
        self._events.append(finished)
        self._end(session, now, clean=True)

    def _refuse(self, session: Session, code: str, message: str, now: float) -> None:
        self._events.append(Refused(session.request, code, message))
        self._end(session, now, clean=False)

    def _end(self, session: Session, now: float, *, clean: bool) -> None:
        del self._by_request[session.request], self._sessions[session.id]
        if session.phase is Phase.WAITING:
            self.admission.waiting.remove(session)
        elif session.phase is Phase.PAUSED:
            self.admission.paused.remove(session)
        else:
            self._plan.forget(session)
            self._caches.end(session, now, clean=clean)

    def _break(self, why: str, now: float) -> None:
        """The ring is lost: every session ends now, and nothing is sent until it was linked anew and probed."""
        was_serving = self._relinking.serving
        self._relinking.broke()
        if was_serving:
            self._events.append(RingBroken(why))
            for session in list(self._sessions.values()):
                self._refuse(session, "stage_lost", f"{why}; {RELINKING}", now)
            self._caches.lose(now)
            self.costs.forget_links()
        self._outgoing.clear()

    # probes and resets

    def _start_probe(self, nonce: int, now: float) -> None:
        if self.config.num_stages == 1:
            self._relinking.mended()
            self._events.append(Probed(nonce, 0.0))
            return
        self._outgoing += self._relinking.probe(nonce, now)

    def _probed(self, probed: Probed) -> None:
        """A ring that was lost is reset before it counts as probed: its stages may hold what nobody else does."""
        self.costs.observe_road(probed.round_ms)
        if self._relinking.serving:
            self._events.append(probed)
        else:
            self._reset(probed)

    def _reset(self, probed: Probed) -> None:
        below = SessionId(self._next_id)
        self._next_id += 1  # so that no two resets look alike
        self._outgoing.append(self._relinking.reset(below, self.admission.parking.ids, probed))

    def _reset_returned(self, below: SessionId, keep: tuple[SessionId, ...]) -> None:
        """What came back is parked on every stage. The rest is forgotten; the stages that still hold it hear of that
        by one more reset, which names only what all of them have."""
        probed = self._relinking.reset_returned(below)
        if probed is not None and self._caches.forget_all_but(keep):
            self._reset(probed)
        elif probed is not None:
            self._relinking.mended()
            self._events.append(probed)
