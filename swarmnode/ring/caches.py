"""Gives caches back on every stage: tells them, frees stage 0's own, and keeps the room until they have answered."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from swarmnode.ring.leaving import Departure
from swarmnode.ring.messages import Drop, End, Envelope
from swarmnode.ring.parking import PARK_MIN, Parked, packed
from swarmnode.ring.work import Continuation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.ids import SessionId
    from swarmnode.ring.admission import Admission, Start
    from swarmnode.ring.head_config import HeadConfig
    from swarmnode.ring.relinking import Relinking
    from swarmnode.ring.session import Session


class Caches:
    """Ends, drops and parks; `outgoing` and `freed` are the head's own lists of effects."""

    def __init__(
        self,
        config: HeadConfig,
        admission: Admission,
        relinking: Relinking,
        outgoing: list[Envelope],
        freed: list[SessionId],
    ) -> None:
        self._config = config
        self._admission = admission
        self._budget = admission.budget
        self._parking = admission.parking
        self._leaving = admission.leaving
        self._relinking = relinking
        self._outgoing = outgoing
        self._freed = freed

    def end(self, session: Session, now: float, *, clean: bool) -> None:
        """The session is over; after a clean end what every stage holds of it may stay, parked."""
        parked = self._to_park(session) if clean else None
        if parked is None:
            self._freed.append(session.id)
        source = self._let_go(session)
        self._leave(session.id, End(session.id, parked.length if parked is not None else 0), now, parked)
        if source is not None:
            self.drop(source, now)

    def pause(self, session: Session, now: float, *, lacking: bool = False) -> None:
        """Its caches go on every stage, and it stays; `lacking`: a stage has not what it should have continued."""
        gen = session.gen
        if lacking and session.source is not None:
            self._parking.spoil(session.source)
        source = self._let_go(session)
        session.pause()
        self._freed.append(session.id)
        self._leave(session.id, Drop(session.id, gen), now)
        if source is not None:
            self.drop(source, now)

    def drop(self, parked: Parked, now: float) -> None:
        """A parked conversation has to go."""
        self._parking.remove(parked)
        self._freed.append(parked.id)
        self._leave(parked.id, Drop(parked.id, parked.gen), now)

    def start(self, start: Start, now: float) -> None:
        """Let a session begin; a source of copies stays until the copy was made."""
        session, prefix = start.session, start.prefix
        if prefix is None:
            session.begin(now)
            return
        source = prefix.source
        if not start.move:
            source.pins += 1
            self._parking.add(source)
        session.begin(now, Continuation(source.id, prefix.length, start.move), source)

    def started(self, session: Session, now: float) -> None:
        """A piece came back: what the session continues is its own on every stage."""
        start, source = session.start, session.source
        session.start = session.source = None
        if start is None or source is None:
            return
        if start.move:
            self._admission.settle(session)
            return
        source.pins -= 1
        if source.spoiled and not source.pins:
            self.drop(source, now)

    def forget_all_but(self, keep: Sequence[SessionId]) -> bool:
        """What a reset did not bring back is parked no more, and no stage needs to be told; False: it brought all."""
        lacking = [parked for parked in self._parking if parked.id not in keep]
        for parked in lacking:
            self._parking.remove(parked)
            self._freed.append(parked.id)
            self._budget.release(parked.id)
        return bool(lacking)

    def left(self, session: SessionId, gen: int | None, now: float) -> None:
        """Every stage has freed it, or parked it."""
        departure = self._leaving.pop((session, gen), None)
        if departure is None:
            return
        parked = departure.parked
        if parked is None:
            self._budget.release(session)
            return
        self._budget.shrink(session, parked.held_tokens)
        self._parking.add(parked)
        surplus = parked if parked.spoiled else next(self._parking.idle(), None)
        if surplus is not None and (parked.spoiled or len(self._parking) > self._config.max_parked):
            self.drop(surplus, now)

    def lose(self, now: float) -> None:
        """The ring is lost: nobody will answer. What was to be parked is not known to be."""
        for key, departure in tuple(self._leaving.items()):
            if departure.parked is not None:
                self._freed.append(key[0])
            self._leaving[key] = replace(departure, parked=None)
            self.left(*key, now)

    def _to_park(self, session: Session) -> Parked | None:
        length, held = session.confirmed, session.sent
        if not (self._config.prefix_reuse and self._relinking.serving) or length < PARK_MIN:
            return None
        if self._config.exact_prefix and held != length:
            return None
        tokens = (session.prompt + tuple(session.reply))[:length]
        return Parked(session.id, session.gen, packed(tokens), held)

    def _let_go(self, session: Session) -> Parked | None:
        """Undo a continuation nobody has confirmed; the source, where it has to go.

        A source that was to be moved may be moved on some stages and parked on others: both are told to go.
        """
        start, source = session.start, session.source
        session.start = session.source = None
        if start is None or source is None:
            return None
        if start.move:
            self._budget.transfer(session.id, source.id, source.held_tokens)
            return source
        source.pins -= 1
        return source if source.spoiled and not source.pins else None

    def _leave(self, session: SessionId, message: End | Drop, now: float, parked: Parked | None = None) -> None:
        gen = message.gen if isinstance(message, Drop) else None
        self._leaving[session, gen] = Departure(now, parked)
        if self._config.num_stages == 1 or not self._relinking.serving:
            self.left(session, gen, now)
        else:
            self._outgoing += [Envelope("act", message), Envelope("pre", message)]
