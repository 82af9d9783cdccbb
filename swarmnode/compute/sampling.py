"""Choose a token from logits: temperature, top_k, top_p, min_p, greedy. No torch: float64 on the CPU.

The noise of a position is one uniform number, a function of (seed, position) alone (Philox used as a counter), turned
into a token by the inverse of the cumulative distribution in order of token ids. So the same token comes out whatever
the batch, the stage count or a replay. Filters apply in transformers' order: temperature, top_k, top_p, min_p, each on
what the one before left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from swarmnode.errors import StageFailed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swarmnode.ring.work import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures this small are greedy: dividing by them overflows and changes nothing."""
_HEAD_CANDIDATES = 1024
"""top_p first looks among this many likely tokens; sorting a vocabulary of 150,000 costs more than a small forward."""
_WORD = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """The noise of a position, in [0, 1): 53 bits of Philox4x64 with key `seed` at counter `position`."""
    generator = np.random.Philox(key=seed & _WORD, counter=[position & _WORD, 0, 0, 0])
    return (int(generator.random_raw()) >> 11) * 2.0**-53


def choose(logits: NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """The token for absolute `position` from (vocab,) logits; raises StageFailed on NaN or infinite logits."""
    if not np.isfinite(logits).all():
        raise StageFailed(f"the model gave NaN or infinite logits for position {position}; try --dtype float32")
    if sampling.temperature < GREEDY_BELOW:
        return int(np.argmax(logits))
    weights = kept_weights(logits, sampling)
    cumulative = np.cumsum(weights)
    point = uniform(sampling.seed, position) * cumulative[-1]
    token = int(np.searchsorted(cumulative, point, side="right"))
    # Rounding can put the point at the very end of the sum; the last token with weight is meant.
    return min(token, int(np.flatnonzero(weights)[-1]))


def kept_weights(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    """Unnormalised float64 probabilities by token id, zero where a filter removed the token."""
    scaled = logits.astype(np.float64) / sampling.temperature
    weights: NDArray[np.float64] = np.exp(scaled - scaled.max())
    if 0 < sampling.top_k < len(weights):
        weights = _keep(weights, _likeliest(weights, sampling.top_k))
    if sampling.top_p < 1.0:
        weights = _keep(weights, _nucleus(weights, sampling.top_p))
    if sampling.min_p > 0.0:
        weights = np.where(weights >= sampling.min_p * weights.max(), weights, 0.0)
    return weights


def _likeliest(weights: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Ids of the `count` largest, likeliest first; equals go by lower id."""
    if count >= len(weights):
        everything: NDArray[np.intp] = np.argsort(-weights, kind="stable")
        return everything
    threshold = np.partition(weights, len(weights) - count)[len(weights) - count]
    candidates = np.flatnonzero(weights >= threshold)
    return candidates[np.argsort(-weights[candidates], kind="stable")][:count]


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """The likeliest ids up to and with the one that brings their share to `top_p`; 0 keeps only the first."""
    needed = top_p * weights.sum()
    ordered = _likeliest(weights, _HEAD_CANDIDATES)
    cumulative = np.cumsum(weights[ordered])
    if cumulative[-1] < needed:
        ordered = _likeliest(weights, len(weights))
        cumulative = np.cumsum(weights[ordered])
    return ordered[: int(np.searchsorted(cumulative, needed, side="left")) + 1]


def _keep(weights: NDArray[np.float64], ids: NDArray[np.intp]) -> NDArray[np.float64]:
    kept = np.zeros_like(weights)
    kept[ids] = weights[ids]
    return kept
