"""A later stage: runs the groups and pieces that frames bring, passes them on, and keeps no plan of its own.

Its caches are a function of the frames it saw. `End` and `Drop` free (or park) at once and leave a floor: frames of
that session that were still under way are skipped until the same came on both lanes; the last stage then answers
`Ended`. A parked session is held until a piece continues it, a `Drop` ends it, or a `Reset` does not name it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from swarmnode.errors import CacheGap
from swarmnode.ids import SessionId
from swarmnode.machine import drain
from swarmnode.ring.floors import EVERY_GEN, Floors
from swarmnode.ring.messages import (
    Broken,
    Drop,
    End,
    Ended,
    Envelope,
    Failed,
    Group,
    Piece,
    PieceDone,
    Probe,
    Reset,
    RingMessage,
    Row,
    Tokens,
)
from swarmnode.ring.turns import Turns
from swarmnode.ring.work import DecodeRow, GroupWork, PieceWork, Work, WorkResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swarmnode.ring.work import Continuation, Failure


@dataclass(slots=True)
class _Held:
    """What this stage knows of a session: its generation, and the positions in its cache (None: it failed here)."""

    gen: int
    length: int | None = 0


@dataclass(slots=True)
class _Queued:
    message: Piece | Group
    arrived_s: float
    started_s: float = 0.0
    ended: dict[SessionId, int] = field(default_factory=dict)
    """Sessions that ended (up to a generation) while this stood in the queue: the floor may be gone before its turn."""

    def skips(self, row: Row) -> bool:
        return row.gen <= self.ended.get(row.session, -1)


class Stage:
    """A `Machine[Envelope, Envelope, Never]` with work, for stages 1 … last; see the module docstring."""

    def __init__(self, index: int, num_stages: int) -> None:
        self.index = index
        self.is_last = index == num_stages - 1
        self._held: dict[SessionId, _Held] = {}
        self._parked: dict[SessionId, int] = {}
        """Positions of every session that is parked here."""
        self._floors = Floors()
        self._below = SessionId(0)
        """Of the last reset: older sessions are over, but for those it kept."""
        self._kept: frozenset[SessionId] = frozenset()
        self._groups: deque[_Queued] = deque()
        self._pieces: deque[_Queued] = deque()
        self._running: tuple[Work, _Queued, tuple[Row, ...]] | None = None
        self._turns = Turns()
        self._wakes_s: float | None = None
        """When a piece that waits for a late step stops waiting."""
        self._outgoing: list[Envelope] = []
        self._freed: list[SessionId] = []

    def receive(self, envelope: Envelope, now: float) -> None:
        match envelope.message:
            case Group() as message:
                for row in message.rows:
                    self._turns.over(row.session)
                self._groups.append(_Queued(message, now))
            case Piece() as message:
                self._pieces.append(_Queued(message, now))
            case End() | Drop() as end:
                self._end(end, envelope.lane)
            case Reset() as reset:
                self._reset(reset)
            case Failed() | Broken() as bad_news:
                self._send_on("act", bad_news)
            case Probe(lane=lane) as probe:
                self._send_on(lane, replace(probe, hops=probe.hops + 1))
            case _:
                raise ValueError(f"stage {self.index} got {type(envelope.message).__name__} on {envelope.lane}")

    def handle_timer(self, now: float) -> None:
        """Time alone changes nothing but whose turn it is, and `next_work` asks that: the head owns every deadline."""

    def next_timer(self) -> float | None:
        return self._wakes_s

    def outgoing(self) -> list[Envelope]:
        return drain(self._outgoing)

    def freed(self) -> list[SessionId]:
        """Sessions whose cache on this stage must go before any further work is run."""
        return drain(self._freed)

    def snapshot(self) -> dict[str, int]:
        return {
            "sessions": len(self._held),
            "parked": len(self._parked),
            "floors": len(self._floors),
            "queued": len(self._groups) + len(self._pieces),
        }

    # work

    def next_work(self, now: float) -> Work | None:
        """A piece where it is a piece's turn, else the group that came first."""
        self._wakes_s = None
        while self._groups or self._pieces:
            take_piece = bool(self._pieces) and self._turns.piece_is_next(bool(self._groups), now)
            if not take_piece and not self._groups:
                self._wakes_s = self._turns.held_until_s(now)
                break
            queued = self._pieces.popleft() if take_piece else self._groups.popleft()
            queued.started_s = now
            work = self._admit(queued)
            if work is not None:
                if isinstance(work, GroupWork):
                    self._turns.step_begins()
                else:
                    self._turns.piece_begins()
                return work
        self._turns.idles()
        return None

    def _admit(self, queued: _Queued) -> Work | None:
        message = queued.message
        if isinstance(message, Piece):
            row = Row(message.session, message.gen, message.pos, len(message.ids))
            if queued.skips(row) or not self._fits(row, message.start):
                return None
            piece = PieceWork(
                session=message.session,
                pos=message.pos,
                ids=message.ids,
                last=message.last,
                hidden=message.hidden,
                sampling=message.sampling,
                start=message.start,
            )
            self._running = (piece, queued, ())
            return piece
        keep = [i for i, row in enumerate(message.rows) if not queued.skips(row) and self._fits(row)]
        if not keep:
            return None
        rows = tuple(message.rows[i] for i in keep)
        group = GroupWork(tuple(DecodeRow(r.session, r.pos) for r in rows), message.hidden.take_rows(keep))
        self._running = (group, queued, rows)
        return group

    def _fits(self, row: Row, start: Continuation | None = None) -> bool:
        """Whether the row is to be run; answers a gap with `Failed`, skips what is floored, failed or of an old gen."""
        if row.session < self._below or row.session in self._parked or self._floors.covers(row.session, row.gen):
            return False
        held = self._held.setdefault(row.session, _Held(row.gen))
        if row.gen < held.gen or (held.length is None and row.gen == held.gen):
            return False
        length = held.length or 0
        if start is not None:
            length = min(start.length, self._parked.get(start.source, 0))
        if row.pos > length:
            past = f"a cache of {length}" if start is None else f"session {start.source}, of which {length} are parked"
            self._fail(row.session, row.gen, CacheGap.code, f"position {row.pos} follows {past}")
            return False
        if start is not None and start.move:
            del self._parked[start.source]
        held.gen, held.length = row.gen, row.pos + row.n
        return True

    def complete(self, work: Work, result: WorkResult, now: float) -> None:
        """Send on what the engine made of the work `next_work` returned last."""
        if self._running is None or self._running[0] is not work:
            raise RuntimeError("complete() of a work that is not running")
        _, queued, rows = self._running
        self._running = None
        self._report(result.failed)
        message = queued.message
        compute_ms = (*message.compute_ms, result.compute_ms)
        queue_ms = message.queue_ms + (queued.started_s - queued.arrived_s) * 1e3
        if isinstance(message, Piece):
            if message.session in self._held and message.session not in result.failed:
                self._piece_computed(message, result, compute_ms, queue_ms)
        else:
            self._turns.step_ended(slot=message.slot)
            self._group_computed(message, rows, result, compute_ms, queue_ms, now)

    def _piece_computed(self, piece: Piece, result: WorkResult, compute_ms: tuple[float, ...], queue_ms: float) -> None:
        if self.is_last:
            token = result.tokens[0] if result.tokens else None
            answer = PieceDone(piece.session, piece.gen, piece.pos, len(piece.ids), token, compute_ms, queue_ms)
            self._send_on("pre", answer)
        elif result.hidden is not None:
            onward = replace(piece, hidden=result.hidden, compute_ms=compute_ms, queue_ms=queue_ms)
            self._send_on("pre", onward)

    def _group_computed(
        self,
        group: Group,
        rows: tuple[Row, ...],
        result: WorkResult,
        compute_ms: tuple[float, ...],
        queue_ms: float,
        now: float,
    ) -> None:
        done = [row for row in rows if row.session not in result.failed]
        keep = [i for i, row in enumerate(done) if row.session in self._held]
        alive = tuple(done[i] for i in keep)
        if not alive:
            return
        if group.round_ms is not None:
            self._turns.left([row.session for row in alive], group.round_ms, compute_ms[-1], now)
        if self.is_last:
            tokens = tuple(result.tokens[i] for i in keep)
            self._send_on("act", Tokens(alive, tokens, compute_ms, queue_ms))
        elif result.hidden is not None:
            hidden = result.hidden.take_rows(keep)
            self._send_on("act", Group(alive, hidden, compute_ms, queue_ms, group.round_ms, group.slot))

    # ends

    def _end(self, end: End | Drop, lane: str) -> None:
        session, gen = end.session, end.gen if isinstance(end, Drop) else EVERY_GEN
        if session < self._below and session not in self._kept:
            return  # from before the reset, on a lane that was slower than its
        if not self._floors.stands(session, gen):
            self._turns.over(session)
            self._give_back(session, gen, end.park if isinstance(end, End) else 0)
        for queued in (*self._groups, *self._pieces):
            queued.ended[session] = max(gen, queued.ended.get(session, gen))
        if not self.is_last:
            self._send_on(lane, end)
        if self._floors.lay(session, gen, lane) and self.is_last:
            self._send_on("act", Ended(session, end.gen if isinstance(end, Drop) else None))

    def _give_back(self, session: SessionId, gen: int, park: int) -> None:
        """Free the session's cache, or park it where it holds what is to stay."""
        held = self._held.get(session)
        if held is not None and held.gen <= gen:
            del self._held[session]
            if park and (held.length or 0) >= park:
                self._parked[session] = park
            else:
                self._freed.append(session)
        elif held is None and gen != EVERY_GEN:
            self._parked.pop(session, None)
            self._freed.append(session)  # also one whose move failed half way

    def _reset(self, reset: Reset) -> None:
        """Only what every stage has parked goes on; nothing else of the sessions so far is left or will be run."""
        keep = tuple(session for session in reset.keep if session in self._parked)
        self._freed += [session for session in (*self._held, *self._parked) if session not in keep]
        self._held.clear()
        self._parked = {session: self._parked[session] for session in keep}
        self._floors.clear()
        self._groups.clear()
        self._pieces.clear()
        self._turns.all_over()
        self._below, self._kept = reset.below, frozenset(keep)
        self._send_on("act", Reset(reset.below, keep))

    def _report(self, failed: Mapping[SessionId, Failure]) -> None:
        for session, failure in failed.items():
            if held := self._held.get(session):
                self._fail(session, held.gen, failure.code, failure.message)

    def _fail(self, session: SessionId, gen: int, code: str, message: str) -> None:
        """End a session here; the head answers the client and sends `End` round."""
        self._held[session] = _Held(gen, None)
        self._freed.append(session)
        self._send_on("act", Failed(session, gen, code, f"stage {self.index}: {message}"))

    def _send_on(self, lane: str, message: RingMessage) -> None:
        self._outgoing.append(Envelope("tok" if self.is_last else lane, message))
