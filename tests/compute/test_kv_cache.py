from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.compute.kv_cache import GROWTH_TOKENS, SessionCache, StepCache, grown_capacity
from swarmnode.errors import StageFailed


def rows(n: int, start: int) -> torch.Tensor:
    """(1, 2, n, 4) with the position as value."""
    return torch.arange(start, start + n, dtype=torch.float32).view(1, 1, n, 1).expand(1, 2, n, 4)


@given(st.lists(st.tuples(st.sampled_from(["append", "crop"]), st.integers(1, 200)), max_size=12))
def test_it_holds_what_a_list_would(steps: list[tuple[str, int]]) -> None:
    cache, plain = SessionCache(1), list[float]()
    for action, n in steps:
        if action == "append":
            keys, values = cache.append(0, rows(n, len(plain)), -rows(n, len(plain)))
            plain += [float(len(plain) + i) for i in range(n)]
            assert keys[0, 1, :, 2].tolist() == plain
            assert values[0, 0, :, 0].tolist() == [-x for x in plain]
        else:
            del plain[min(n, len(plain)) :]
            cache.crop(len(plain))
        assert cache.length == len(plain)


def test_the_past_is_not_copied_while_there_is_room() -> None:
    cache = SessionCache(1)
    first, _ = cache.append(0, rows(1, 0), rows(1, 0))
    for position in range(1, GROWTH_TOKENS):
        keys, _ = cache.append(0, rows(1, position), rows(1, position))
        assert keys.data_ptr() == first.data_ptr()
    keys, _ = cache.append(0, rows(1, GROWTH_TOKENS), rows(1, GROWTH_TOKENS))
    assert keys.data_ptr() != first.data_ptr()
    assert cache.size_bytes() == 2 * 2 * (2 * GROWTH_TOKENS) * 4 * 4


def test_capacity_grows_by_64_and_later_by_an_eighth() -> None:
    assert [grown_capacity(n, c) for n, c in [(1, 0), (64, 0), (65, 64), (300, 64), (513, 512), (4097, 4096)]] == [
        64, 64, 128, 320, 576, 4608,
    ]  # fmt: skip


def test_a_crop_brings_layers_of_a_failed_forward_to_one_length() -> None:
    cache = SessionCache(3)
    for layer in range(3):
        cache.append(layer, rows(5, 0), rows(5, 0))
    cache.append(0, rows(2, 5), rows(2, 5))
    assert cache.length == 5
    cache.crop(5)
    keys, _ = cache.append(0, rows(1, 5), rows(1, 5))
    assert keys.shape[2] == 6


def test_a_gap_raises() -> None:
    cache = SessionCache(2)
    cache.append(0, rows(3, 0), rows(3, 0))
    cache.append(1, rows(2, 0), rows(2, 0))
    with pytest.raises(StageFailed, match="holds 2 positions, the work starts at position 3"):
        cache.crop(3)


def test_row_i_goes_to_session_i_at_its_own_length() -> None:
    sessions = [SessionCache(2), SessionCache(2)]
    sessions[1].append(1, rows(4, 0), rows(4, 0))
    batch = torch.tensor([10.0, 20.0]).view(2, 1, 1, 1).expand(2, 2, 1, 4)
    views, same = StepCache(sessions, first_layer=7).update(batch, batch, 8)
    assert views is same
    assert [k[0, 0, :, 0].tolist() for k in views.keys] == [[10.0], [0.0, 1.0, 2.0, 3.0, 20.0]]
    assert [v.shape[2] for v in views.values] == [1, 5]
