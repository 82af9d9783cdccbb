"""The simulator's world with scripted engines: every token is known, and every row that goes astray is caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sims.world import GREEDY, Link, Node, Outcome, Request, World
from swarmnode.compute.ring_loop import run_work
from swarmnode.compute.scripted import ScriptedEngine
from swarmnode.compute.spec import StageSpec
from swarmnode.ids import SessionId
from swarmnode.ring.head_config import HeadConfig
from swarmnode.ring.work import DecodeRow, GroupWork, PieceWork

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from swarmnode.compute.script import Script
    from swarmnode.ring.work import Work, WorkResult

__all__ = ["EOS", "GREEDY", "Link", "Outcome", "Request", "RingWorld", "WatchedEngine"]
EOS = 0


class WatchedEngine:
    """The engine, with a list of what it ran and the sessions it holds caches for; sleeping only adds up seconds."""

    def __init__(self, script: Script, spec: StageSpec) -> None:
        self.took_s = 0.0
        self.caches: set[SessionId] = set()
        self.works: list[Work] = []
        self._engine = ScriptedEngine(script, spec, self._sleep)

    def run(self, work: Work) -> WorkResult:
        self.works.append(work)
        rows = [work.session] if isinstance(work, PieceWork) else [row.session for row in work.rows]
        self.caches |= set(rows)
        if isinstance(work, PieceWork) and work.start is not None and work.start.move:
            self.caches.discard(work.start.source)
        return self._engine.run(work)

    def free(self, session: SessionId) -> None:
        self.caches.discard(session)
        self._engine.free(session)

    def kv_tokens(self) -> int:
        return self._engine.kv_tokens()

    def kv_bytes(self) -> int:
        return self._engine.kv_bytes()

    def _sleep(self, seconds: float) -> None:
        self.took_s += seconds


COUNTS = ("kv_budget_tokens", "pauses")
"""Gauges that are nothing a session holds."""


class RingWorld(World):
    """A ring of scripted stages; `scripts` gives single stages their own."""

    def __init__(
        self,
        config: HeadConfig,
        script: Script,
        *,
        links: Sequence[Link] | None = None,
        scripts: Mapping[int, Script] | None = None,
        seed: int = 0,
    ) -> None:
        count = config.num_stages
        self.engines = [WatchedEngine((scripts or {}).get(i, script), stage_spec(i, count)) for i in range(count)]
        super().__init__(config, self.engines, links or [Link()] * count, seed=seed, trace=True)

    def forget_parked(self) -> None:
        """As if all of the parked had been evicted."""
        for parked in self.head.admission.parking:
            self.head._caches.drop(parked, self.now_s)
        self._flush(self.nodes[0])
        self.run_until_quiet()

    def leftovers(self) -> dict[str, int]:
        """Everything that must be zero when no request runs: machines, budgets and the engines' caches."""
        left = {f"head {key}": value for key, value in self.head.snapshot().items() if key not in COUNTS}
        for stage in self.stages:
            left |= {f"stage {stage.index} {key}": value for key, value in stage.snapshot().items()}
        for index, engine in enumerate(self.engines):
            left[f"engine {index} sessions"] = len(engine.caches)
            left[f"engine {index} kv_tokens"] = engine.kv_tokens()
        return {key: value for key, value in left.items() if value}

    def _run(self, node: Node, work: Work) -> WorkResult:
        """As the worker does: a group whose forward fails runs row by row."""
        self.engines[node.stage].took_s = 0.0
        return run_work(node.engine, work)

    def _free(self, node: Node, session: SessionId) -> None:
        if session in self.engines[node.stage].caches:
            self._log(str(node.stage), lambda: f"frees session {session}")
        super()._free(node, session)


def stage_spec(index: int, count: int) -> StageSpec:
    """One layer a stage: as much as a scripted engine needs to know."""
    return StageSpec(Path(), (), index, index + 1, count, index == 0, index == count - 1)


def head_config(num_stages: int = 2, **changes: object) -> HeadConfig:
    """A small ring's settings, with what a test changes."""
    base = HeadConfig(
        num_stages=num_stages,
        context_tokens=4096,
        kv_tokens=8192,
        max_in_flight=16,
        max_waiting=16,
        eos_token_ids=frozenset({EOS}),
        prefill_chunk=4,
        typical_tokens=64,
        schedule="source",
        prefix_reuse=False,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def tokens_alone(script: Script, request: Request, eos: frozenset[int] = frozenset({EOS})) -> list[int]:
    """The reply one engine that holds all layers gives, without any ring: the obvious implementation."""
    engine = ScriptedEngine(script, stage_spec(0, 1), lambda seconds: None)
    session, prompt = SessionId(1), request.prompt
    tokens = list(engine.run(PieceWork(session, 0, prompt, True, sampling=request.sampling)).tokens)
    while tokens[-1] not in eos and (request.max_new_tokens is None or len(tokens) < request.max_new_tokens):
        row = DecodeRow(session, len(prompt) + len(tokens) - 1, tokens[-1])
        tokens += engine.run(GroupWork((row,))).tokens
    return tokens
