"""Waits before a lost machine is dialled again."""

from __future__ import annotations

import random

import pytest

from swarmnode.cluster.reconnecting import WAITS_S, wait_s


@pytest.mark.parametrize(("draw", "part"), [(0.0, 0.5), (1.0, 1.0)])
def test_waits_grow_with_the_attempts_up_to_a_most(draw: float, part: float) -> None:
    waits = [wait_s(attempts, lambda: draw) for attempts in range(7)]
    assert waits == pytest.approx([part * most_s for most_s in (*WAITS_S, WAITS_S[-1], WAITS_S[-1])])
    assert wait_s(9, lambda: draw, most_s=2.0) == pytest.approx(part * 2.0)


def test_fifty_that_lost_one_machine_together_come_back_apart() -> None:
    """No tenth of the time between the first and the last of them sees a third of them."""
    draw = random.Random(0).random
    for attempts in range(5):
        waits = sorted(wait_s(attempts, draw) for _ in range(50))
        tenth_s = (waits[-1] - waits[0]) / 10
        assert waits[-1] - waits[0] >= 0.4 * WAITS_S[attempts]
        assert all(sum(begin <= wait < begin + tenth_s for wait in waits) < 50 / 3 for begin in waits)
