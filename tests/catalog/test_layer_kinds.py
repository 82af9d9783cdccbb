"""Layers with a recurrent state, from the config alone."""

from __future__ import annotations

from typing import Any

import pytest

from swarmnode.catalog.layer_kinds import recurrent_layers, state_values

LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 8,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 8}, ()),
        ({"layer_types": ["linear_attention", "full_attention", "linear_attention"]}, (0, 2)),
        (LINEAR, (0, 1, 2, 4, 5, 6)),
        (LINEAR | {"num_hidden_layers": 4, "full_attention_interval": 2}, (0, 2)),
        (LINEAR | {"full_attention_interval": 0}, ()),
        (LINEAR | {"num_hidden_layers": "8"}, ()),
    ],
)
def test_which_layers(config: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert recurrent_layers(config) == expected


def test_the_size_of_a_state() -> None:
    assert state_values(LINEAR) == (2 * 2 * 16 + 4 * 8) * 4 + 4 * 16 * 8
    assert state_values(LINEAR | {"linear_conv_kernel_dim": 3}) == 96 * 3 + 512
    assert state_values({"num_hidden_layers": 8}) == 0
    assert state_values(LINEAR | {"linear_key_head_dim": "16"}) == 0
