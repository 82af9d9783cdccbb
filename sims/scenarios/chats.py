"""Conversations of several turns over one system prompt: what parked caches save, and what little memory costs.

Two alike stages (a decode step of one row 50 ms, a piece of 256 positions 1,200 ms, as in `mixed`), 20 ms between
them. A user reads the reply for a while, then asks again with all that was said before. Replies end by themselves, so
the head does not know how long they get: in a tight budget they run out of room, and the youngest is paused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from sims.engines import TOKEN
from sims.report import percentile
from sims.ring import RingSpec, links_of
from sims.scenarios.mixed import STAGE
from sims.world import Request, World
from swarmnode.ring.head_messages import Finished, HeadEvent, Sampled

if TYPE_CHECKING:
    from swarmnode.ids import SessionId

USERS = 12
TURNS = 5
SYSTEM_TOKENS = 600
QUESTION_TOKENS = 60
REPLY_TOKENS = 120
"""On average; each reply is half to one and a half times as long."""
TYPICAL_TOKENS = 64
"""Reserved for a reply at first: less than most of them need, so that room is short where the budget is."""
READS_S = 20.0
RTT_MS = 20.0
BUDGETS = {"roomy": 32_000, "tight": 5_000}
"""All conversations at their end take about 18,000 tokens."""
LONG_TOKENS = 1_500


@dataclass(slots=True)
class _User:
    """One conversation; its turns are requests of their own."""

    index: int
    random: Random
    said: tuple[int, ...] = tuple(range(1, SYSTEM_TOKENS + 1))
    turn: int = 0
    reply_tokens: int = 0
    heard: int = 0
    asked_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)

    @property
    def request(self) -> str:
        return f"user-{self.index}-turn-{self.turn}"


class _Chats:
    """Users who go on: every event of a request may be the reason for the next."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.pauses = 0
        self.cached = 0
        self.asked = 0
        self.done_s = 0.0
        """When the last reply so far ended."""
        self._paused: set[SessionId] = set()
        self.users = [_User(i, Random(f"{seed}/{i}")) for i in range(USERS)]
        self._by_request: dict[str, _User] = {}
        world.told, world.watch = self._told, self._count_pauses
        for user in self.users:
            self._ask(user, user.random.uniform(0, READS_S))

    def _ask(self, user: _User, in_s: float) -> None:
        user.turn += 1
        user.said += tuple(range(1_000 * (user.index + 1), 1_000 * (user.index + 1) + QUESTION_TOKENS))
        user.reply_tokens = round(REPLY_TOKENS * user.random.uniform(0.5, 1.5))
        user.heard, user.asked_s = 0, self.world.now_s + in_s
        self._by_request[user.request] = user
        self.asked += len(user.said)
        self.world.open(Request(user.request, user.said), user.asked_s)

    def _told(self, event: HeadEvent) -> None:
        if isinstance(event, Sampled):
            user = self._by_request[event.request]
            user.heard += 1
            if user.heard == 1:
                user.ttft_s.append(self.world.now_s - user.asked_s)
            if user.heard == user.reply_tokens:
                self.world.cancel(event.request, reason="stop")
        elif isinstance(event, Finished):
            self.cached += event.cached_tokens
            self.done_s = self.world.now_s
            user = self._by_request[event.request]
            user.said += (TOKEN,) * user.heard
            if user.turn < TURNS:
                self._ask(user, READS_S * user.random.uniform(0.5, 1.5))

    def _count_pauses(self, world: World) -> None:
        paused = {session.id for session in world.head.admission.paused}
        self.pauses += len(paused - self._paused)
        self._paused = paused


def run(seed: int = 0, *, prefix_reuse: bool = True) -> dict[str, Any]:
    rows = [_row(name, kv_tokens, seed, prefix_reuse) for name, kv_tokens in BUDGETS.items()]
    return {
        "users": USERS,
        "turns": TURNS,
        "prefix_reuse": prefix_reuse,
        "long_conversation": _second_turn(seed, prefix_reuse),
        "rows": rows,
    }


def _row(name: str, kv_tokens: int, seed: int, prefix_reuse: bool) -> dict[str, Any]:
    world = _spec(kv_tokens, seed, prefix_reuse).build()
    chats = _Chats(world, seed)
    begin_s = world.now_s
    world.run_until_quiet()
    (first, later) = ([user.ttft_s[0] for user in chats.users], [s for user in chats.users for s in user.ttft_s[1:]])
    return {
        "budget": name,
        "kv_tokens": kv_tokens,
        "asked_positions": chats.asked,
        "continued_positions": chats.cached,
        "read_positions": world.nodes[0].engine.read_positions,  # type: ignore[attr-defined]
        "pauses": chats.pauses,
        "first_ttft_p50_s": round(percentile(first, 0.5), 2),
        "later_ttft_p50_s": round(percentile(later, 0.5), 2),
        "later_ttft_p90_s": round(percentile(later, 0.9), 2),
        "all_done_s": round(chats.done_s - begin_s),
    }


def _second_turn(seed: int, prefix_reuse: bool) -> dict[str, Any]:
    """One user alone: the second turn of a long conversation against its new tokens as a prompt of their own."""
    past = tuple(range(1, LONG_TOKENS + 1))
    question = tuple(range(9_000, 9_000 + QUESTION_TOKENS))
    ttft_s = {}
    for name, turns in {"second_turn": (past, (*past, TOKEN, *question)), "new_tokens_alone": (question,)}.items():
        world = _spec(BUDGETS["roomy"], seed, prefix_reuse).build()
        for index, prompt in enumerate(turns):
            asked_s, outcome = world.now_s, world.open(Request(f"turn-{index}", prompt, 2))
            world.run_until_quiet()
            ttft_s[name] = outcome.seconds_of(Sampled) - asked_s
    ratio = ttft_s["second_turn"] / ttft_s["new_tokens_alone"]
    return {f"{name}_ttft_s": round(s, 3) for name, s in ttft_s.items()} | {"ratio": round(ratio, 3)}


def _spec(kv_tokens: int, seed: int, prefix_reuse: bool) -> RingSpec:
    return RingSpec(
        (STAGE, STAGE),
        links_of(2, RTT_MS),
        kv_tokens=kv_tokens,
        typical_tokens=TYPICAL_TOKENS,
        prefix_reuse=prefix_reuse,
        seed=seed,
    )
