"""Run a ring's work on one stage with torch: the real `swarmnode.ring.work.Engine`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from swarmnode.compute.activation import to_activation, to_rows
from swarmnode.compute.freed_memory import return_freed_memory
from swarmnode.compute.kv_cache import SessionCache
from swarmnode.compute.sampling import choose
from swarmnode.errors import CacheGap, StageFailed
from swarmnode.ring.work import GroupWork, PieceWork, Sampling, WorkResult

if TYPE_CHECKING:
    from swarmnode.compute.stage_model import StageModel
    from swarmnode.ids import SessionId
    from swarmnode.ring.work import Activation, Continuation, DecodeRow, Work

RETURN_BYTES = 64 << 20
"""Caches freed on a CPU until the C library is told to let go: rarely enough to cost nothing."""
IDLE_WORKS = 64
"""A session that so many forwards passed by is parked, as far as can be seen here. Hundreds of them may be, so their
unused room is given back; one that was only slow pays one copy of its past."""


@dataclass(slots=True)
class _Session:
    """What this stage holds for a conversation. `history` (last stage): prompt ids and sampled tokens by position."""

    cache: SessionCache
    history: list[int] = field(default_factory=list)
    sampling: Sampling = field(default_factory=Sampling)
    last_work: int = 0


class TorchEngine:
    """Synchronous, one thread. Whatever `run` raises, the sessions' next work crops them back to its `pos`."""

    def __init__(self, model: StageModel) -> None:
        self.model = model
        self._sessions: dict[SessionId, _Session] = {}
        self._works = 0
        self._freed_bytes = 0
        """Of caches, since they were last given back to the system."""

    def run(self, work: Work) -> WorkResult:
        """One forward: a piece of one prompt, or one position of several sessions."""
        self._works += 1
        with torch.inference_mode():
            return self._run_piece(work) if isinstance(work, PieceWork) else self._run_group(work)

    def free(self, session: SessionId) -> None:
        gone = self._sessions.pop(session, None)
        if gone is None or self.model.device.type != "cpu":
            return
        self._freed_bytes += gone.cache.size_bytes()
        del gone
        if self._freed_bytes >= RETURN_BYTES:
            self._freed_bytes = 0
            return_freed_memory()

    def kv_tokens(self) -> int:
        return sum(session.cache.length for session in self._sessions.values())

    def kv_bytes(self) -> int:
        return sum(session.cache.size_bytes() for session in self._sessions.values())

    def probe(self) -> SessionCache:
        """Run one throwaway position through the slice; returns the cache that it left."""
        model, cache = self.model, SessionCache(self.model.num_layers)
        with torch.inference_mode():
            rows = torch.zeros((1, 1, model.hidden_size), dtype=model.dtype, device=model.device)
            if model.is_first:
                rows = model.embed(torch.zeros((1, 1), dtype=torch.long, device=model.device))
            positions = torch.zeros((1, 1), dtype=torch.long, device=model.device)
            (model.logits if model.is_last else model.hidden)(rows, positions, [cache])
        return cache

    def _run_piece(self, work: PieceWork) -> WorkResult:
        n = len(work.ids)
        if not n:
            raise StageFailed(f"session {work.session}: a piece without ids")
        session = self._session_of(work)
        if self.model.is_last:
            if work.sampling is not None:
                session.sampling = work.sampling
            session.history[work.pos :] = work.ids
        rows = self._rows(work.hidden, [work.ids], n).view(1, n, self.model.hidden_size)
        positions = torch.arange(work.pos, work.pos + n, device=self.model.device)[None]
        if not (self.model.is_last and work.last):
            hidden = self.model.hidden(rows, positions, [session.cache])
            return WorkResult() if self.model.is_last else WorkResult(hidden=to_activation(hidden[0]))
        logits = self.model.logits(rows, positions, [session.cache])
        return WorkResult(tokens=self._sample(logits, [session], [work.pos + n]))

    def _run_group(self, work: GroupWork) -> WorkResult:
        n = len(work.rows)
        if len({row.session for row in work.rows}) != n or not n:
            raise StageFailed("a group holds each session once, and at least one")
        sessions = [self._session_for(row) for row in work.rows]
        ids = [[-1 if row.token is None else row.token] for row in work.rows]
        rows = self._rows(work.hidden, ids, n).view(n, 1, self.model.hidden_size)
        positions = torch.tensor([[row.pos] for row in work.rows], device=self.model.device)
        caches = [session.cache for session in sessions]
        if not self.model.is_last:
            hidden = self.model.hidden(rows, positions, caches)
            return WorkResult(hidden=to_activation(hidden[:, 0]))
        logits = self.model.logits(rows, positions, caches)
        return WorkResult(tokens=self._sample(logits, sessions, [row.pos + 1 for row in work.rows]))

    def _session_of(self, piece: PieceWork) -> _Session:
        """The piece's session with its past: nothing, a parked one's, or what earlier pieces wrote."""
        if piece.start is not None or piece.pos == 0:
            self._trim_idle()
        if piece.start is not None:
            if piece.start.length != piece.pos:
                raise StageFailed(f"the piece begins at {piece.pos}, but continues {piece.start.length} positions")
            self._sessions[piece.session] = self._continued(piece.start, piece.pos + len(piece.ids))
        elif piece.pos == 0:
            self._sessions[piece.session] = _Session(SessionCache(self.model.num_layers))
        return self._session_at(piece.session, piece.pos)

    def _continued(self, start: Continuation, room: int) -> _Session:
        """A session with a parked one's past, in its buffers or in copies, with room for `room` positions."""
        source = self._sessions.get(start.source)
        if source is None:
            raise CacheGap(f"session {start.source}, which is to be continued, is not here")
        if self.model.is_last and len(source.history) < start.length:
            raise CacheGap(f"session {start.source} knows {len(source.history)} tokens, not {start.length}")
        if not start.move:
            return _Session(source.cache.copy(start.length, room), source.history[: start.length])
        source.cache.crop(start.length)
        source.cache.fit(room)
        del self._sessions[start.source]
        return _Session(source.cache, source.history[: start.length])

    def _session_at(self, key: SessionId, pos: int) -> _Session:
        """The session cropped to `pos`; the one place where a cache and its history are cut."""
        session = self._sessions.get(key)
        if session is None:
            raise CacheGap(f"session {key} is not here; its work starts at position {pos}")
        session.cache.crop(pos)
        session.last_work = self._works
        return session

    def _trim_idle(self) -> None:
        for session in self._sessions.values():
            if session.last_work < self._works - IDLE_WORKS:
                session.cache.trim()

    def _session_for(self, row: DecodeRow) -> _Session:
        session = self._session_at(row.session, row.pos)
        if self.model.is_last:
            # The row's own token is part of the past: it was sampled for position `pos`.
            del session.history[row.pos + 1 :]
            if len(session.history) != row.pos + 1:
                raise StageFailed(
                    f"session {row.session}: {len(session.history)} tokens are known, the row is at position {row.pos}"
                )
        return session

    def _rows(self, arrived: Activation | None, ids: list[tuple[int, ...]] | list[list[int]], n: int) -> torch.Tensor:
        """What enters the slice: embedded ids on stage 0, the previous stage's rows elsewhere."""
        model = self.model
        if not model.is_first:
            if arrived is None:
                raise StageFailed("a later stage got work without hidden states")
            return to_rows(arrived, n, model.hidden_size, model.dtype, model.device)
        flat = [token for row in ids for token in row]
        if min(flat) < 0 or max(flat) >= model.config.vocab_size:
            raise StageFailed(f"token ids must be 0 to {model.config.vocab_size - 1}")
        return model.embed(torch.tensor(flat, device=model.device))

    def _sample(self, logits: torch.Tensor, sessions: list[_Session], positions: list[int]) -> tuple[int, ...]:
        rows = logits.float().cpu().numpy()
        tokens = tuple(
            choose(row, session.sampling, position)
            for row, session, position in zip(rows, sessions, positions, strict=True)
        )
        for session, token in zip(sessions, tokens, strict=True):
            session.history.append(token)
        return tokens
