"""What a head says of its work: requests as rows of a story with times."""

from __future__ import annotations

import pytest

from swarmnode.cluster.head_activity import RATE_S, SLOTS_PER_S, HeadActivity


def test_a_reply_gives_its_first_tokens_time_a_rate_and_then_idleness() -> None:
    head = HeadActivity(100.0)
    assert (head.requests, head.last_ttft_s, head.tokens_per_s(105.0), head.idle_s(105.0)) == (0, None, 0.0, 5.0)
    head.opened("a", 106.0)
    head.gave("a", 0, 106.5)
    assert head.last_ttft_s is None, "text that was held back is no first token"
    head.gave("a", 1, 107.0)
    head.gave("a", 4, 108.0)
    assert (head.last_ttft_s, head.running, head.idle_s(108.0)) == (1.0, 1, 0.0)
    assert head.tokens_per_s(108.0) == pytest.approx(5 / RATE_S)
    head.ended("a", 109.0)
    assert (head.running, head.idle_s(112.0)) == (0, 3.0)
    assert head.tokens_per_s(107.0 + RATE_S) == pytest.approx(4 / RATE_S)
    assert head.tokens_per_s(108.0 + RATE_S) == 0.0


def test_what_it_did_not_open_counts_for_nothing() -> None:
    head = HeadActivity(0.0)
    head.gave("never opened", 5, 1.0)
    head.ended("never opened", 2.0)
    assert (head.requests, head.tokens_per_s(2.0), head.idle_s(2.0)) == (0, 0.0, 2.0)


@pytest.mark.parametrize("texts_per_s", [1, 64, 640, 6400])
def test_the_rate_is_that_of_the_texts_however_many_come(texts_per_s: int) -> None:
    head = HeadActivity(0.0)
    head.opened("a", 0.0)
    for number in range(25 * texts_per_s + 1):
        head.gave("a", 2, number / texts_per_s)
    assert head.tokens_per_s(25.0) == pytest.approx(2 * texts_per_s, rel=0.02)
    assert len(head._slots) <= RATE_S * SLOTS_PER_S


def test_a_burst_counts_whole() -> None:
    head = HeadActivity(0.0)
    head.opened("a", 0.0)
    for _ in range(8192):
        head.gave("a", 1, 1.0)
    assert head.tokens_per_s(1.0) == 8192 / RATE_S
    assert len(head._slots) == 1
