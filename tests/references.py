"""What transformers' own `generate` says: the measure of every parity test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

NEAR_TIE = 1e-4
"""A first difference is excused only where the reference's two best logits are closer than this."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What transformers' own generate gave, with the distance of the two best logits at every token."""

    tokens: list[int]
    gaps: list[float]


def generate(model: Any, prompt: Sequence[int], n: int) -> Reference:
    import torch

    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        max_new_tokens=n,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [logits[0].topk(2).values for logits in out.logits]
    return Reference(out.sequences[0, len(prompt) :].tolist(), [float(pair[0] - pair[1]) for pair in best])
