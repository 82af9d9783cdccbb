"""Drive stages in one process as a ring would: activations go from engine to engine, tokens come back."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from references import NEAR_TIE

from swarmnode.compute.spec import StageSpec
from swarmnode.ids import SessionId
from swarmnode.ring.work import Continuation, DecodeRow, GroupWork, PieceWork, Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch
    from references import Reference

    from swarmnode.ring.work import Engine, Work, WorkResult

GREEDY = Sampling(temperature=0.0)


def even_cuts(layers: int, stages: int) -> list[int]:
    return [layers * i // stages for i in range(stages + 1)]


def as_servable(checkpoint: Path, target: Path) -> tuple[Path, tuple[Path, ...]]:
    """A folder as stages expect it; the checkpoint's own weight files serve as shards."""
    (target / "tokenizer").mkdir(parents=True)
    shutil.copy(checkpoint / "config.json", target / "tokenizer")
    return target, tuple(sorted(checkpoint.glob("*.safetensors")))


def stage_specs(checkpoint: Path, target: Path, layers: int, cuts: Sequence[int], **settings: Any) -> list[StageSpec]:
    folder, files = as_servable(checkpoint, target)
    return [
        StageSpec(folder, files, begin, end, layers, begin == 0, end == layers, **settings)
        for begin, end in pairwise(cuts)
    ]


class Chain:
    """Engines in ring order; remembers nothing that a head would not."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self.positions: dict[int, int] = {}
        self.tokens: dict[int, int] = {}

    def prefill(
        self,
        session: int,
        prompt: Sequence[int],
        piece: int,
        sampling: Sampling = GREEDY,
        start: Continuation | None = None,
    ) -> int:
        """Run a whole prompt in pieces, or what of it is not continued from `start`; returns its first token."""
        token = None
        begin = 0 if start is None else start.length
        for pos in range(begin, len(prompt), piece):
            ids = tuple(prompt[pos : pos + piece])
            last = pos + piece >= len(prompt)
            first = {"sampling": sampling, "start": start} if pos == begin else {}
            work = PieceWork(SessionId(session), pos, ids, last, **first)  # type: ignore[arg-type]
            result = self._round(work)
            assert len(result.tokens) == (1 if last else 0)
            token = result.tokens[0] if last else None
        assert token is not None
        self.positions[session], self.tokens[session] = len(prompt), token
        return token

    def step(self, *sessions: int) -> list[int]:
        """One decode position of each session, as one group."""
        rows = tuple(DecodeRow(SessionId(s), self.positions[s], self.tokens[s]) for s in sessions)
        tokens = self._round(GroupWork(rows)).tokens
        for session, token in zip(sessions, tokens, strict=True):
            self.positions[session] += 1
            self.tokens[session] = token
        return list(tokens)

    def free(self, session: int) -> None:
        for engine in self.engines:
            engine.free(SessionId(session))

    def reply(self, session: int, prompt: Sequence[int], n: int, piece: int, sampling: Sampling = GREEDY) -> list[int]:
        """`n` tokens after a prompt, the session then freed."""
        tokens = self.park(session, prompt, n, piece, sampling)
        self.free(session)
        return tokens

    def park(
        self,
        session: int,
        prompt: Sequence[int],
        n: int,
        piece: int,
        sampling: Sampling = GREEDY,
        start: Continuation | None = None,
    ) -> list[int]:
        """`n` tokens after a prompt, the session then left where it is."""
        tokens = [self.prefill(session, prompt, piece, sampling, start)]
        while len(tokens) < n:
            tokens += self.step(session)
        return tokens

    def _round(self, work: Work) -> WorkResult:
        result = self.engines[0].run(work)
        for engine in self.engines[1:]:
            result = engine.run(onward(work, result))
        return result


def onward(work: Work, result: WorkResult) -> Work:
    """The work of the next stage."""
    if isinstance(work, PieceWork):
        return PieceWork(work.session, work.pos, work.ids, work.last, result.hidden, work.sampling, work.start)
    return GroupWork(tuple(DecodeRow(row.session, row.pos) for row in work.rows), result.hidden)


@dataclass(slots=True)
class Parity:
    """Counts compared tokens and excused near ties."""

    tokens: int = 0
    excused: int = 0

    def check(self, ours: Sequence[int], reference: Reference) -> None:
        self.tokens += len(ours)
        for index, (mine, theirs) in enumerate(zip(ours, reference.tokens, strict=True)):
            if mine != theirs:
                assert reference.gaps[index] < NEAR_TIE, f"token {index}: {mine}, transformers says {theirs}"
                self.excused += 1
                return


def logits_of(chain: Chain) -> torch.Tensor:
    """In float32, at every position of a prompt of 30: what a chain of one stage says of it."""
    import torch

    from swarmnode.compute.kv_cache import SessionCache

    (engine,) = chain.engines
    model: Any = engine.model  # type: ignore[attr-defined]
    with torch.inference_mode():
        rows = model.embed(torch.tensor([prompt_of(30)]))
        out: torch.Tensor = model.logits(rows, torch.arange(30)[None], [SessionCache(model.num_layers)])
    return out.float()


def prompt_of(length: int, seed: int = 0, vocab: Mapping[str, int] | int = 384) -> list[int]:
    """Spread ids, none of them special."""
    size = vocab if isinstance(vocab, int) else len(vocab)
    return [3 + (i * 37 + seed * 101 + i * i * 7) % (size - 3) for i in range(length)]
