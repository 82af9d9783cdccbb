"""Random faults befall members and their coordinator, then the network is whole and must come to rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sims.member_frames import COORDINATOR
from sims.members import MembersWorld
from sims.timeline import Stuck
from swarmnode.cluster.membership import NodeState

if TYPE_CHECKING:
    from collections.abc import Callable

    from sims.member_frames import Weather

WHOLE_S = 90.0
"""Within this of a whole network everybody holds one table: deaths are noticed, old links given up, new ones made."""
FAULTS_EVERY_S = 6.0


def torture(
    seed: int,
    *,
    count: int = 3,
    seconds: float = 90.0,
    faults_every_s: float = FAULTS_EVERY_S,
    weather: Weather | None = None,
    world: Callable[..., MembersWorld] = MembersWorld,
) -> MembersWorld:
    """Random faults, then a whole network; raises Violation, or Stuck where the tables do not become one in time."""
    made = world(count, seed, weather)
    for node in made.hosts:
        made.at(made.random.random(), lambda node=node: made.start(node))  # type: ignore[misc]
    at_s = made.random.expovariate(1 / faults_every_s)
    while at_s < seconds:
        made.at(at_s, lambda: _fault(made))
        at_s += made.random.expovariate(1 / faults_every_s)
    made.run_until(seconds)
    made.heal()
    while made.differences():
        if made.now_s >= seconds + WHOLE_S:
            raise Stuck(f"{WHOLE_S:.0f} s after the network is whole: {made.differences()}")
        made.run_until(made.now_s + 1.0)
    return made


def _fault(world: MembersWorld) -> None:
    """One thing goes wrong, or right again."""
    world.faults += 1
    node = world.random.choice(list(world.hosts))
    match world.random.randrange(12):
        case 0:
            world.kill(node)
        case 1:
            world.lose_power(node)
        case 2 | 3:
            world.start(node)
        case 4:
            world.pause(node)
        case 5:
            world.resume(node)
        case 6:
            world.pause_coordinator()
        case 7:
            world.resume_coordinator()
        case 8:
            world.cut.add(world.random.choice([(node, COORDINATOR), (COORDINATOR, node)]))
        case 9:
            world.cut.clear()
        case 10:
            world.set_slow(not world.listening.slow)
        case _:
            world.succeed()


def returns_under_cut(seed: int, seconds: float = 300.0, world: Callable[..., MembersWorld] = MembersWorld) -> int:
    """How often a host came back under a cut of one of its two ways that lasts; it and the coordinator run on."""
    made = world(2, seed, None)
    for node in made.hosts:
        made.start(node)
    made.run_until(30.0 + made.random.random())
    node = next(iter(made.hosts))
    made.cut.add(made.random.choice([(node, COORDINATOR), (COORDINATOR, node)]))
    cut_s = made.now_s
    made.run_until(cut_s + seconds)
    after = [change for at_s, change in made.changes if at_s > cut_s and change.node == node]
    return sum(change.state is NodeState.ALIVE for change in after)
