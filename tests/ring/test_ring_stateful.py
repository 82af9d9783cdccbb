"""Any mix of requests, cancels, failures and lost links, at any moments: every request ends once, nothing is left."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ring_world import Link, Request, RingWorld, head_config, tokens_alone

from swarmnode.compute.script import Reply, Script
from swarmnode.ring.head_messages import Finished
from swarmnode.ring.messages import Broken, Ended, Envelope
from swarmnode.ring.session import Phase

FIRST_FAILING = 900
FAILING = tuple(
    Reply(when=(FIRST_FAILING + 10 * at + layer,), ids=(3,) * 60, fail_at=at, fail_layer=layer)
    for at in range(3)
    for layer in range(4)
)
SCRIPT = Script(
    replies=(*FAILING, Reply(when=(800,), ids=tuple(range(10, 20))), Reply(when=(801,), ids=tuple(range(20, 60)))),
    default=(6, 7, 8),
    then="repeat",
    prefill_ms_per_token=3,
    decode_ms=7,
    row_ms=1,
)
MOST_PIECES = 60
"""A piece's way over its slowest part, plus one: 4 × 15 ms of compute and 720 ms of road over 15 ms at most."""
MARKERS = st.sampled_from([1, 1, 1, 800, 800, 801, *(reply.when[0] for reply in FAILING)])


class RingUnderTest(RuleBasedStateMachine):
    @initialize(
        num_stages=st.integers(1, 4),
        latency_ms=st.lists(st.sampled_from([0, 1, 12, 150]), min_size=4, max_size=4),
        jitter_ms=st.sampled_from([0, 30]),
        chunk=st.sampled_from([0, 2, 5]),
        max_in_flight=st.integers(1, 5),
        max_waiting=st.integers(0, 4),
        kv_tokens=st.sampled_from([60, 200, 2000]),
        schedule=st.sampled_from(["cost", "source"]),
        prefix_reuse=st.booleans(),
        seed=st.integers(0, 3),
    )
    def build(
        self,
        num_stages: int,
        latency_ms: list[int],
        jitter_ms: int,
        chunk: int,
        max_in_flight: int,
        max_waiting: int,
        kv_tokens: int,
        schedule: str,
        prefix_reuse: bool,
        seed: int,
    ) -> None:
        config = head_config(
            num_stages,
            prefill_chunk=chunk,
            max_in_flight=max_in_flight,
            max_waiting=max_waiting,
            kv_tokens=kv_tokens,
            context_tokens=120,
            typical_tokens=16,
            schedule=schedule,
            prefix_reuse=prefix_reuse,
        )
        links = [Link(ms / 1e3, jitter_ms / 1e3) for ms in latency_ms[:num_stages]]
        self.world = RingWorld(config, SCRIPT, links=links, seed=seed)
        self.world.watch = check_every_step
        self.asked: dict[str, Request] = {}
        self.lost = False

    @rule(marker=MARKERS, length=st.integers(1, 70), new=st.one_of(st.none(), st.integers(1, 60)))
    def open(self, marker: int, length: int, new: int | None) -> None:
        name = f"r{len(self.asked)}"
        self.asked[name] = Request(name, (marker, *range(100, 99 + length)), new)
        self.world.open(self.asked[name])

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), reason=st.sampled_from(["cancelled", "stop"]))
    def cancel(self, data: st.DataObject, reason: str) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.asked))), reason=reason)

    @rule(ms=st.sampled_from([0, 1, 5, 20, 100, 700]))
    def wait(self, ms: int) -> None:
        self.world.run_until(self.world.now_s + ms / 1e3)

    @precondition(lambda self: not self.lost and self.world.config.num_stages > 1 and len(self.asked) > 2)
    @rule(stage=st.integers(0, 3), tell_head=st.booleans())
    def lose_link(self, stage: int, tell_head: bool) -> None:
        self.lost = True
        self.world.lose_link(stage % self.world.config.num_stages, tell_head=tell_head)

    @precondition(lambda self: not self.lost and self.world.config.num_stages > 1 and len(self.asked) > 2)
    @rule(stage=st.integers(1, 3))
    def hang(self, stage: int) -> None:
        self.lost = True
        self.world.nodes[1 + stage % (self.world.config.num_stages - 1)].hung = True

    @precondition(lambda self: self.world.cut)
    @rule()
    def relink(self) -> None:
        self.lost = False
        self.world.inject(0, Envelope("tok", Broken(0)))  # nodes say so before they link a ring anew
        self.world.relink()

    @invariant()
    def no_request_ends_twice(self) -> None:
        if hasattr(self, "world"):
            assert all(len(outcome.ends) <= 1 for outcome in self.world.outcomes.values())

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.run_until_quiet()
        ends = Counter(len(outcome.ends) for outcome in self.world.outcomes.values())
        assert set(ends) <= {1}
        self.world.forget_parked()
        left = self.world.leftovers()
        if self.lost:  # a ring that is not linked anew is unloaded; its head must be empty all the same
            left = {key: value for key, value in left.items() if key.startswith(("head", "engine 0"))}
        assert not left
        for name, outcome in self.world.outcomes.items():
            if count := len(outcome.tokens):
                assert outcome.tokens == tokens_alone(SCRIPT, replace(self.asked[name], max_new_tokens=count))
            if isinstance(outcome.ends[0], Finished):
                assert outcome.ends[0].completion_tokens == count


def check_every_step(world: RingWorld) -> None:
    head = world.head
    sessions, admission = head._sessions.values(), head.admission
    budget = admission.budget
    ids = [*(s.id for s in sessions), *(session for session, _ in admission.leaving), *admission.parking.ids]
    assert budget.used_tokens == sum(map(budget.held_by, set(ids))) <= budget.total_tokens
    running = [s for s in sessions if s.phase in (Phase.PREFILL, Phase.DECODE)]
    assert all(budget.held_by(s.id) >= s.sent for s in running)
    assert len(running) <= head.config.max_in_flight
    assert len(admission.waiting) <= max(1, head.config.max_waiting)  # one may wait for parked ones to leave
    most = head.config.num_stages if head.config.schedule == "source" else MOST_PIECES
    assert sum(len(s.pieces) for s in sessions) <= most
    if world.sent and isinstance(world.sent[-1][2].message, Ended):
        gone = world.sent[-1][2].message.session
        for stage in world.stages:
            assert gone not in stage._held
            assert gone not in stage._floors
        parked = gone in world.stages[-1]._parked
        # what ends beside a piece is freed as the piece ends, before anything else is run
        at_rest = [node.engine for node in world.nodes if not node.listens]
        assert all((gone in engine.caches) == parked for engine in at_rest)  # type: ignore[attr-defined]


RingUnderTest.TestCase.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
TestRing = RingUnderTest.TestCase
