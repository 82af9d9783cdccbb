"""Choose a token from logits: temperature, top_k, top_p, min_p, greedy. No torch.

The noise of a position is one uniform number, a function of (seed, position) alone (Philox used as a counter). The
inverse of the cumulative distribution, summed in float64 in order of token ids, makes it a token. So the same token
comes out whatever the batch, the stage count or a replay. Filters apply in transformers' order: temperature, top_k,
top_p, min_p, each on what the one before left.
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
_FIRST_CANDIDATES = 256
"""top_p first looks among this many likely tokens: sorting a vocabulary of 150,000 costs more than a small forward."""
_BLOCK = 256
"""Ids summed together; near the square root of a vocabulary, where both running sums are short."""
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
    return draw(kept_weights(logits, sampling), uniform(sampling.seed, position))


def draw(weights: NDArray[np.float32], share: float) -> int:
    """The first id at which the running sum of weights exceeds `share` of the whole, `share` in [0, 1).

    Summed by blocks first: a running sum over the whole vocabulary costs ten times as much.
    """
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64)
    sums = np.cumsum(blocks)
    point = share * sums[-1]
    # Rounding can put the point at the very end of a sum; the last with weight is meant.
    block = min(int(np.searchsorted(sums, point, side="right")), int(np.flatnonzero(blocks)[-1]))
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    rest = point - (sums[block - 1] if block else 0.0)
    index = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), rest, side="right"))
    return block * _BLOCK + min(index, int(np.flatnonzero(inside)[-1]))


def kept_weights(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float32]:
    """Unnormalised probabilities by token id (the best has 1), zero where a filter removed the token."""
    weights: NDArray[np.float32] = np.exp((logits - logits.max()) / np.float32(sampling.temperature))
    if 0 < sampling.top_k < len(weights):
        weights = _keep(weights, _likeliest(logits, sampling.top_k))
    if sampling.top_p < 1.0:
        weights = _keep(weights, _nucleus(logits, weights, sampling.top_p))
    if sampling.min_p > 0.0:
        weights = np.where(weights >= sampling.min_p * weights.max(), weights, np.float32(0))
    return weights


def _likeliest(logits: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Ids of the `count` largest, likeliest first; equals go by lower id."""
    candidates = np.arange(len(logits))
    if count < len(logits):
        threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
        candidates = np.flatnonzero(logits >= threshold)
    order: NDArray[np.intp] = candidates[np.argsort(-logits[candidates], kind="stable")][:count]
    return order


def _nucleus(logits: NDArray[np.float32], weights: NDArray[np.float32], top_p: float) -> NDArray[np.intp]:
    """The likeliest ids up to and with the one that brings their share to `top_p`; 0 keeps only the first."""
    needed = top_p * weights.sum(dtype=np.float64)
    count = _FIRST_CANDIDATES
    while True:
        ordered = _likeliest(logits, count)
        cumulative = np.cumsum(weights[ordered], dtype=np.float64)
        if cumulative[-1] >= needed or count >= len(logits):
            return ordered[: int(np.searchsorted(cumulative, needed, side="left")) + 1]
        count *= 8


def _keep(weights: NDArray[np.float32], ids: NDArray[np.intp]) -> NDArray[np.float32]:
    kept = np.zeros_like(weights)
    kept[ids] = weights[ids]
    return kept
