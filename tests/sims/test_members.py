"""Members under loss, doubles, late frames, pauses, one-way cuts, restarts and failovers; planted bugs are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sims import member_hosts
from sims.member_frames import Weather
from sims.member_torture import returns_under_cut, torture
from sims.members import MembersWorld
from sims.timeline import Stuck, Violation
from swarmnode.cluster.member_table import KnownMembers
from swarmnode.cluster.membership import Late, Membership, NodeState
from swarmnode.cluster.reconnecting import WAITS_S
from swarmnode.cluster.roll import Answer, Roll

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.cluster.member_table import Mark, Update
    from swarmnode.cluster.membership import Connected, Heard, MembershipInput
    from swarmnode.ids import NodeId

SEEDS = 1000
SEEDS_TO_FIND_A_BUG = 1000
CUT_SEEDS = 100


@pytest.mark.parametrize("part", range(2))
def test_nothing_breaks_the_promises(part: int) -> None:
    faults = deaths = terms = 0
    for seed in range(part * SEEDS // 2, (part + 1) * SEEDS // 2):
        world = torture(seed, count=5 if seed % 4 == 0 else 3)
        deaths += sum(change.state is NodeState.DEAD for _, change in world.changes)
        faults, terms = faults + world.faults, terms + world.term
    assert faults > 10 * SEEDS / 2
    assert deaths > SEEDS / 2
    assert terms > SEEDS


def test_a_cut_that_lasts_makes_nobody_come_and_go() -> None:
    """In five minutes; one return may be what was under way before."""
    assert max(returns_under_cut(seed) for seed in range(CUT_SEEDS)) <= 1


class CountsDials(MembersWorld):
    """Knows when a coordinator was dialled."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(count, seed)
        self.dials_s: list[float] = []

    def dialed(self, node: NodeId, link: int, who: Heard) -> None:
        self.dials_s.append(self.now_s)
        super().dialed(node, link, who)


CROWD, CROWD_BACK_S, WINDOW_S = 50, 15.0, 0.25


def _crowd_comes_back(seed: int, away_s: float) -> tuple[int, int]:
    """After a coordinator that was `away_s`: how many of the crowd are linked to the next in time, and the most dials
    in any WINDOW_S."""
    world = CountsDials(CROWD, seed)
    for node in world.hosts:
        world.start(node)
    world.run_until(30.0)
    world.kill_coordinator()
    world.run_until(30.0 + away_s)
    world.dials_s = dials_s = []
    world.succeed()
    world.run_until(world.now_s + CROWD_BACK_S)
    most = max(sum(begin <= at_s < begin + WINDOW_S for at_s in dials_s) for begin in dials_s)
    return len(world.links), most


@pytest.mark.parametrize("away_s", [2.0, 10.0, 60.0])
def test_fifty_come_back_in_time_and_not_all_at_once(away_s: float) -> None:
    for seed in range(20):
        back, most = _crowd_comes_back(seed, away_s)
        assert back == CROWD
        assert most < CROWD / 3, f"seed {seed}"


def test_without_jitter_they_would_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_hosts, "wait_s", lambda attempts, draw: WAITS_S[-1])
    assert _crowd_comes_back(0, 10.0)[1] > CROWD / 2


class TakesEarlierProcesses(Membership):
    """Lets whichever process it hears follow the one before."""

    def _hear(self, message: Heard | Connected, now: float) -> None:
        entry = self._entries.get(message.node)
        if entry is not None and entry.boot != message.boot:
            message = type(message)(message.node, message.boot, entry.incarnation + 1)
        super()._hear(message, now)


class TakesLateSignsOfLife(Membership):
    """Lets the dead come back by whatever is heard of them, at no higher incarnation."""

    def _hear(self, message: Heard | Connected, now: float) -> None:
        entry = self._entries.get(message.node)
        if entry is not None and entry.boot == message.boot and entry.state is NodeState.DEAD:
            message = type(message)(message.node, message.boot, entry.incarnation + 1)
        super()._hear(message, now)


class HoldsItsOwnStallsAgainstOthers(Membership):
    """Takes time in which it did not run for others' silence."""

    def _listen(self, now: float) -> None:
        self._ran_s = now


class JudgesBeforeItReads(Membership):
    """Looks at its timers right after a stall."""

    def _listen(self, now: float) -> None:
        super()._listen(now)
        self._judge_at_s = 0.0


class IgnoresItsScore(Membership):
    """Is as impatient when its own loop is late."""

    def receive(self, message: MembershipInput, now: float) -> None:
        super().receive(Late(0) if isinstance(message, Late) else message, now)


class OverlooksSilence(Membership):
    """Waits for a connection's end, which a machine without power does not send."""

    def _dead_at_s(self, entry: Any) -> float:
        return super()._dead_at_s(entry) + (600.0 if entry.parted_s is None else 0.0)


class SendsNoTable(Roll):
    """Has no anti-entropy."""

    def answer(self, beat: Heard, held: Mark) -> Answer:
        return Answer(super().answer(beat, held).above, None)


class TellsNobodyOfTheirDeath(Roll):
    """Gives nobody a reason to say that they live."""

    def answer(self, beat: Heard, held: Mark) -> Answer:
        return Answer(None, super().answer(beat, held).update)


class BelievesEarlierTables(KnownMembers):
    """Takes the table of a coordinator that another followed."""

    def take(self, update: Update, now: float) -> bool:
        if update.mark[0] < self.mark[0]:
            self.mark = (0, 0)
        return super().take(update, now)


class TakesAHalfOpenLinkForLife(MembersWorld):
    """Counts a handshake's beginning, which is heard although no answer gets through."""

    def dialed(self, node: NodeId, link: int, who: Heard) -> None:
        super().dialed(node, link, who)
        self._link_up(link, who)


PLANTED: list[tuple[dict[str, Any], type[Violation], str]] = [
    ({"membership": TakesEarlierProcesses}, Violation, "an earlier process of .* came back"),
    ({"membership": TakesLateSignsOfLife}, Violation, "came back by what it sent before it was dead"),
    ({"membership": HoldsItsOwnStallsAgainstOthers}, Violation, "was declared dead"),
    ({"membership": JudgesBeforeItReads}, Violation, "was declared dead"),
    ({"membership": IgnoresItsScore}, Violation, "was declared dead"),
    ({"membership": OverlooksSilence}, Violation, "and not dead"),
    ({"roll": SendsNoTable}, Stuck, "holds table"),
    ({"roll": TellsNobodyOfTheirDeath}, Stuck, "is not alive"),
    ({"known": BelievesEarlierTables}, Violation, "went back from table"),
]


@pytest.mark.parametrize(
    ("bug", "found", "says"), PLANTED, ids=[next(iter(bug.values())).__name__ for bug, *_ in PLANTED]
)
def test_planted_bugs_are_found(bug: dict[str, Any], found: type[Violation], says: str) -> None:
    with pytest.raises(found, match=says):
        _hunt(lambda count, seed, weather: MembersWorld(count, seed, weather, **bug))


def test_no_bug_is_found_where_none_was_planted() -> None:
    """In the same weather, which is worse than that of the promises' own test."""
    _hunt(MembersWorld)


def test_half_open_links_would_make_a_cut_host_come_and_go() -> None:
    assert max(returns_under_cut(seed, world=TakesAHalfOpenLinkForLife) for seed in range(CUT_SEEDS)) > 1


def _hunt(world: Callable[..., MembersWorld]) -> None:
    for seed in range(SEEDS_TO_FIND_A_BUG):
        torture(seed, faults_every_s=3.0, weather=Weather(late=0.1), world=world)


def test_the_same_seed_gives_the_same_history() -> None:
    assert torture(7).changes == torture(7).changes
    assert torture(7).changes != torture(8).changes
