from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.compute.sampling import choose, draw, kept_weights, uniform
from swarmnode.errors import StageFailed
from swarmnode.ring.work import Sampling

LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0.05, 2),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 50),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
)


def slow(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """The same filters, one obvious step after the other: probabilities of the tokens that stay."""
    scaled = [float(x) / sampling.temperature for x in logits]
    probabilities = {i: float(np.exp(x - max(scaled))) for i, x in enumerate(scaled)}
    order = sorted(probabilities, key=lambda i: (-logits[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        total, so_far, kept = sum(probabilities[i] for i in order), 0.0, []
        for i in order:
            kept.append(i)
            so_far += probabilities[i]
            if so_far >= sampling.top_p * total:
                break
        order = kept
    order = [i for i in order if probabilities[i] >= sampling.min_p * probabilities[order[0]]]
    total = sum(probabilities[i] for i in order)
    return {i: probabilities[i] / total for i in sorted(order)}


@given(LOGITS, SAMPLINGS, st.integers(0, 100_000))
def test_filters_and_draw_agree_with_the_slow_one(logits: list[float], sampling: Sampling, position: int) -> None:
    array = np.array(logits, dtype=np.float32)
    expected = slow(array.tolist(), sampling)
    weights = kept_weights(array, sampling)
    if set(np.flatnonzero(weights)) != set(expected):
        # float32 against float64 may differ at the very edge of a filter or of what float32 can hold.
        assert abs(len(np.flatnonzero(weights)) - len(expected)) <= 1 or min(expected.values()) < 1e-30
        return
    total = weights.sum(dtype=np.float64)
    assert {i: w / total for i, w in enumerate(weights) if w} == pytest.approx(expected, rel=1e-4)
    assert choose(array, sampling, position) in expected


@given(LOGITS)
def test_greedy_and_the_narrowest_filters_take_the_first_best(logits: list[float]) -> None:
    array = np.array(logits, dtype=np.float32)
    best = int(np.argmax(array))
    for sampling in (Sampling(temperature=0), Sampling(top_p=0), Sampling(top_k=1), Sampling(temperature=1e-9)):
        assert choose(array, sampling, 5) == best


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.5), Sampling(top_k=3), Sampling(top_p=0.8), Sampling(1.5, 0.9, 5, 0.05)],
    ids=str,
)
def test_frequencies_follow_the_distribution(sampling: Sampling) -> None:
    """Chi-square over 20,000 positions of one seed; the noise is a function of the position, so this never flakes."""
    logits = [2.0, 1.0, 0.5, 0.0, -1.0, 1.5]
    array, draws = np.array(logits, dtype=np.float32), 6_000
    counts = Counter(choose(array, sampling, position) for position in range(draws))
    expected = slow(logits, sampling)
    assert set(counts) == set(expected)
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    assert chi_square < 20.5  # 0.1 % of a chi-square with 5 degrees of freedom


def test_noise_is_uniform_and_depends_on_seed_and_position_only() -> None:
    noise = np.array([uniform(1, position) for position in range(20_000)])
    assert ((noise >= 0) & (noise < 1)).all()
    counts = np.histogram(noise, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # 0.1 % of 19 degrees of freedom
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.03
    assert uniform(1, 7) == noise[7] != uniform(2, 7)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


@given(
    st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=900).filter(any), st.floats(0, 1, exclude_max=True)
)
def test_a_draw_by_blocks_is_the_draw_by_one_running_sum(weights: list[float], share: float) -> None:
    running = np.cumsum(weights)
    assert draw(np.array(weights, dtype=np.float32), share) == np.flatnonzero(running > share * running[-1])[0]


def test_a_draw_at_the_very_end_takes_the_last_with_weight() -> None:
    weights = np.zeros(1000, dtype=np.float32)
    weights[[3, 300]] = 0.5
    assert [draw(weights, share) for share in (0.0, 0.4999, 0.5, 1.0)] == [3, 3, 300, 300]


def test_a_large_vocabulary_with_a_wide_nucleus() -> None:
    flat = np.zeros(5000, dtype=np.float32)
    kept = np.flatnonzero(kept_weights(flat, Sampling(top_p=0.5)))
    assert kept.tolist() == list(range(2500))
    assert np.flatnonzero(kept_weights(flat, Sampling(top_k=7))).tolist() == list(range(7))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_raise_instead_of_giving_a_token(bad: float) -> None:
    array = np.array([1.0, bad, 2.0], dtype=np.float32)
    for sampling in (Sampling(temperature=0), Sampling()):
        with pytest.raises(StageFailed, match="NaN or infinite logits for position 9"):
            choose(array, sampling, 9)
