"""The source's ways that swarmnode does not have: one frame per session, one group of all, HTTP on the compute thread.

They live here only, to reproduce what the source measured; machines and compute are the same as everywhere.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from sims.world import Link, Node, World
from swarmnode.ring.head import Head
from swarmnode.ring.messages import Envelope, Group, Tokens
from swarmnode.ring.schedule import Pass, SourceSchedule
from swarmnode.ring.work import Activation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sims.engines import TimedEngine
    from swarmnode.ring.head_config import HeadConfig
    from swarmnode.ring.head_messages import HeadInput
    from swarmnode.ring.schedule import Schedule

FRAME_GAP_S = 0.003
"""The source says "a few milliseconds apart"; assumed."""
EPSILON_S = 1e-9


class OneGroup(SourceSchedule):
    """All sessions go round as one group: the next one leaves when the last of them is back."""

    def group_rows(self, now: Pass) -> int:
        return 0 if now.groups_in_flight else min(now.ready, self._config.max_group or now.ready)


@dataclass(frozen=True, slots=True)
class _Part(Envelope):
    """One session's frame of a batch of `batch`."""

    batch: int = 1


class SplitWorld(World):
    """Sends one frame per session, a few ms apart; a stage runs together what has arrived when it looks.

    With `coalesce_s` a stage waits that long for the rest of a batch, counted from the first frame it has of it.
    """

    coalesce_s = 0.0

    def _send(self, stage: int, envelope: Envelope) -> None:
        message = envelope.message
        if not isinstance(message, Group | Tokens):
            super()._send(stage, envelope)
            return
        for index in range(len(message.rows)):
            part = _Part(envelope.lane, _row(message, index), len(message.rows))
            self._at(self._due_s(stage, part) + index * FRAME_GAP_S, partial(self._deliver, self._next(stage), part))

    def _take(self, node: Node) -> list[tuple[float, HeadInput]]:
        parts = [(at_s, message) for at_s, message in node.inbox if isinstance(message, _Part)]
        others = [entry for entry in node.inbox if not isinstance(entry[1], _Part)]
        node.inbox.clear()
        if not parts:
            return others
        whole = len(parts) >= max(part.batch for _, part in parts)
        wait_until_s = parts[0][0] + self.coalesce_s
        if not whole and self.now_s < wait_until_s - EPSILON_S:
            node.inbox.extend(parts)
            self._at(wait_until_s, partial(self._turn, node))
            return others
        if isinstance(node.machine, Head):
            return [*others, *parts]
        groups = [part.message for _, part in parts if isinstance(part.message, Group)]
        return [*others, (parts[0][0], Envelope("act", _merged(groups)))]


def _row(message: Group | Tokens, index: int) -> Group | Tokens:
    if isinstance(message, Tokens):
        return replace(message, rows=(message.rows[index],), tokens=(message.tokens[index],))
    return replace(message, rows=(message.rows[index],), hidden=message.hidden.take_rows([index]))


def _merged(groups: Sequence[Group]) -> Group:
    hidden = groups[0].hidden
    rows = tuple(row for group in groups for row in group.rows)
    data = b"".join(bytes(group.hidden.data) for group in groups)
    return replace(groups[-1], rows=rows, hidden=Activation(hidden.dtype, (len(rows), *hidden.shape[1:]), data))


class PollingWorld(World):
    """One HTTP request each way on the compute thread: a stage pops one frame, computes, and pushes what comes of it.

    A link's latency is the way to the relay and on from it, half of it each. A push holds the thread for a round trip
    to the relay; a pop for one, or until a frame is there. Requests of users reach stage 0 without the relay.
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
        super().__init__(config, engines, links, schedule=schedule, seed=seed, trace=trace)
        stages = range(config.num_stages)
        self._mailboxes: list[deque[Envelope]] = [deque() for _ in stages]
        self._pushes: list[deque[Envelope]] = [deque() for _ in stages]
        self._popping = [False for _ in stages]
        self._pop_waits = [False for _ in stages]
        """The relay holds the stage's pop open, as it has nothing for it."""
        for node in self.nodes:
            self._at(0.0, partial(self._turn, node))

    def _send(self, stage: int, envelope: Envelope) -> None:
        self._pushes[stage].append(envelope)

    def _turn(self, node: Node) -> None:
        """One thing at a time: push what is to be pushed, else compute, else pop."""
        stage, half_s = node.stage, self.links[node.stage].latency_s / 2
        if self._pushes[stage] and not node.busy:
            envelope = self._pushes[stage].popleft()
            node.busy = True
            self._at(self.now_s + half_s, lambda: self._put(self._next(stage), envelope))
            self._at(self.now_s + 2 * half_s, lambda: self._pushed(node))
            return
        super()._turn(node)
        if self._pushes[stage] and not node.busy:
            self._turn(node)
        elif not node.busy and not self._popping[stage]:
            self._popping[stage] = True
            self._at(self.now_s + half_s, lambda: self._pop(stage))

    def _pushed(self, node: Node) -> None:
        node.busy = False
        self._turn(node)

    def _put(self, stage: int, envelope: Envelope) -> None:
        self._mailboxes[stage].append(envelope)
        if self._pop_waits[stage]:
            self._pop(stage)

    def _pop(self, stage: int) -> None:
        """The stage's request is at the relay."""
        self._pop_waits[stage] = not self._mailboxes[stage]
        if self._mailboxes[stage]:
            envelope = self._mailboxes[stage].popleft()
            self._at(self.now_s + self.links[stage].latency_s / 2, lambda: self._popped(stage, envelope))

    def _popped(self, stage: int, envelope: Envelope) -> None:
        self._popping[stage] = False
        self._deliver(stage, envelope)
