"""A ring whose tokens depend on every position of every stage's cache: what is lost, doubled or foreign shows.

A stage folds each position's input into a chain; what it passes on is a function of the whole chain so far, as
attention's output is of the whole past. The next token is a function of the last stage's output, the history of all
tokens, the seed and the position. So a copy of the wrong length, a crop that was missed or a history that was not
carried over gives other tokens than the same request alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ring_world import COUNTS

from sims.world import Link, Request, World
from swarmnode.ids import SessionId
from swarmnode.ring.head_messages import HeadEvent, Started
from swarmnode.ring.work import Activation, DecodeRow, GroupWork, PieceWork, Sampling, WorkResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.ring.head_config import HeadConfig
    from swarmnode.ring.work import Continuation, Work

EOS = 0
_MASK = (1 << 63) - 1


def mixed(*numbers: int) -> int:
    value = 0x1234567
    for number in numbers:
        value = ((value ^ number) * 0x5851F42D4C957F2D + 0x14057B7EF767814F) & _MASK
        value ^= value >> 29
    return value


@dataclass(slots=True)
class _Cache:
    chain: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    sampling: Sampling | None = None


class ChainEngine:
    """One stage; `eos_every`: about every so many tokens the model stops. Gaps raise: no ring may send one."""

    def __init__(self, stage: int, num_stages: int, eos_every: int = 30, ms_per_row: float = 1.0) -> None:
        self.took_s = 0.0
        self.ran_positions = 0
        self.copied = 0
        self._stage, self._is_last = stage, stage == num_stages - 1
        self._eos_every, self._ms_per_row = eos_every, ms_per_row
        self._caches: dict[SessionId, _Cache] = {}

    def run(self, work: Work) -> WorkResult:
        return self._run_piece(work) if isinstance(work, PieceWork) else self._run_group(work)

    def free(self, session: SessionId) -> None:
        self._caches.pop(session, None)

    def kv_tokens(self) -> int:
        return sum(len(cache.chain) for cache in self._caches.values())

    def kv_bytes(self) -> int:
        return 8 * self.kv_tokens()

    def holds(self, session: SessionId) -> int:
        return len(self._caches[session].chain) if session in self._caches else 0

    def _run_piece(self, work: PieceWork) -> WorkResult:
        n = len(work.ids)
        self._spend(n)
        if work.start is not None:
            self._caches[work.session] = self._continued(work.start)
        elif work.pos == 0:
            self._caches[work.session] = _Cache()
        cache = self._cropped(work.session, work.pos)
        cache.history[work.pos :] = work.ids
        if work.sampling is not None:
            cache.sampling = work.sampling
        outputs = [self._append(cache, x) for x in self._inputs(work.hidden, work.ids)]
        if not self._is_last:
            return WorkResult(hidden=_pack(outputs))
        return WorkResult(tokens=(self._sample(cache, outputs[-1]),) if work.last else ())

    def _run_group(self, work: GroupWork) -> WorkResult:
        self._spend(len(work.rows))
        outputs, tokens = [], []
        for row, x in zip(work.rows, self._inputs(work.hidden, [row.token or 0 for row in work.rows]), strict=True):
            cache = self._cropped(row.session, row.pos)
            outputs.append(self._append(cache, x))
            if self._is_last:
                del cache.history[row.pos + 1 :]
                assert len(cache.history) == row.pos + 1, "the last stage does not know the token of this position"
                tokens.append(self._sample(cache, outputs[-1]))
        return WorkResult(tokens=tuple(tokens)) if self._is_last else WorkResult(hidden=_pack(outputs))

    def _continued(self, start: Continuation) -> _Cache:
        source = self._caches[start.source]
        assert len(source.chain) >= start.length
        if self._is_last:
            assert len(source.history) >= start.length
        if start.move:
            del self._caches[start.source]
        else:
            self.copied += start.length
        return _Cache(source.chain[: start.length], source.history[: start.length])

    def _cropped(self, session: SessionId, pos: int) -> _Cache:
        cache = self._caches[session]
        assert len(cache.chain) >= pos, f"session {session}: {len(cache.chain)} positions, the work starts at {pos}"
        del cache.chain[pos:]
        return cache

    def _append(self, cache: _Cache, x: int) -> int:
        past = cache.chain[-1] if cache.chain else 1
        cache.chain.append(mixed(past, x, self._stage))
        return mixed(cache.chain[-1], len(cache.chain))

    def _sample(self, cache: _Cache, output: int) -> int:
        assert cache.sampling is not None
        drawn = mixed(output, *cache.history, cache.sampling.seed, len(cache.history))
        token = EOS if drawn % self._eos_every == 0 else 1 + drawn // self._eos_every % 50
        cache.history.append(token)
        return token

    def _inputs(self, hidden: Activation | None, ids: Sequence[int]) -> list[int]:
        if hidden is None:
            assert self._stage == 0
            return list(ids)
        assert self._stage > 0
        return [x for (x,) in struct.iter_unpack("<q", hidden.data)]

    def _spend(self, rows: int) -> None:
        self.ran_positions += rows
        self.took_s = (2.0 + self._ms_per_row * rows) / 1e3


def _pack(outputs: Sequence[int]) -> Activation:
    return Activation("float32", (len(outputs), 2), struct.pack(f"<{len(outputs)}q", *outputs))


class ChainWorld(World):
    """A ring of chain engines whose memory is watched after every step."""

    def __init__(
        self, config: HeadConfig, *, links: Sequence[Link] | None = None, seed: int = 0, eos_every: int = 30
    ) -> None:
        count = config.num_stages
        self.chains = [ChainEngine(i, count, eos_every) for i in range(count)]
        super().__init__(config, self.chains, links or [Link()] * count, seed=seed, trace=True)
        self.asked: dict[str, Request] = {}
        self.started: list[str] = []
        self.eos_every = eos_every
        self.most_paused = 0
        self.watch, self.told = check_memory, self._note

    def ask(self, request: Request, at_s: float | None = None) -> None:
        self.asked[request.name] = request
        self.open(request, at_s)

    def forget_parked(self) -> None:
        """As if all of the parked had been evicted."""
        for parked in self.head.admission.parking:
            self.head._caches.drop(parked, self.now_s)
        self._flush(self.nodes[0])
        self.run_until_quiet()

    def check_the_end(self) -> None:
        """Everything has ended, once, with its own tokens, and nothing is left."""
        self.run_until_quiet()
        for name, outcome in self.outcomes.items():
            assert len(outcome.ends) == 1, name
            alone = tokens_alone(self.asked[name], len(self.nodes), self.eos_every, max(1, len(outcome.tokens)))
            assert outcome.tokens == alone[: len(outcome.tokens)], name
        self.forget_parked()
        assert not self.leftovers()

    def leftovers(self) -> dict[str, int]:
        left = {f"head {key}": value for key, value in self.head.snapshot().items() if key not in COUNTS}
        for stage in self.stages:
            left |= {f"stage {stage.index} {key}": value for key, value in stage.snapshot().items()}
        left |= {f"engine {i}": len(chain._caches) for i, chain in enumerate(self.chains)}
        return {key: value for key, value in left.items() if value}

    def _note(self, event: HeadEvent) -> None:
        if isinstance(event, Started):
            assert not self.head.admission.paused, "nobody starts before those who were paused are back"
            self.started.append(event.request)


def check_memory(world: World) -> None:
    """No stage holds more than the head has reserved, and that is never more than there is."""
    assert isinstance(world, ChainWorld)
    admission = world.head.admission
    budget, sessions = admission.budget, world.head._sessions
    world.most_paused = max(world.most_paused, len(admission.paused))
    assert budget.used_tokens <= budget.total_tokens
    assert admission.parking.tokens == sum(budget.held_by(s) for s in admission.parking.ids)
    for session in sessions.running():
        assert budget.held_by(session.id) >= session.sent
    if world.head._relinking.serving:  # the stages of a lost ring are told by its reset
        # what was freed beside a piece goes as it ends, before anything else is run
        held = [node.engine for node in world.nodes if not node.listens]
        assert max((engine.kv_tokens() for engine in held), default=0) <= budget.used_tokens  # type: ignore[attr-defined]
    assert sorted(s.id for s in admission.paused) == [s.id for s in admission.paused]


def tokens_alone(request: Request, num_stages: int, eos_every: int = 30, most: int = 1 << 30) -> list[int]:
    """The reply without any ring: one stage after the other, one session, nothing parked."""
    engines = [ChainEngine(i, num_stages, eos_every) for i in range(num_stages)]
    session, tokens = SessionId(1), list[int]()
    most = min(most, request.max_new_tokens or most)

    def through(work: Work) -> int:
        result = WorkResult()
        for engine in engines:
            hidden = result.hidden
            if isinstance(work, PieceWork):
                work = PieceWork(session, work.pos, work.ids, work.last, hidden, work.sampling)
            else:
                work = GroupWork(work.rows, hidden)
            result = engine.run(work)
        return result.tokens[0]

    tokens.append(through(PieceWork(session, 0, request.prompt, True, sampling=request.sampling)))
    while tokens[-1] != EOS and len(tokens) < most:
        tokens.append(through(GroupWork((DecodeRow(session, len(request.prompt) + len(tokens) - 1, tokens[-1]),))))
    return tokens
