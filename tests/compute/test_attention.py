"""The registered attention function against attention written out position by position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from swarmnode.compute import attention
from swarmnode.compute.attention import MODES, attention_mode, groups_pieces, session_attention
from swarmnode.compute.kv_cache import SessionViews
from swarmnode.config import read_settings
from swarmnode.errors import InvalidRequest, LoadRefused, StageFailed

HEAD_DIM = 8
MODULE = torch.nn.Module()


def slow(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None, softcap: float | None
) -> torch.Tensor:
    """(heads, n, d) against (kv_heads, length, d), one head and one position at a time, in float64."""
    heads, n, _ = query.shape
    group, length = heads // keys.shape[0], keys.shape[1]
    out = torch.empty(n, heads, HEAD_DIM, dtype=torch.float64)
    for head in range(heads):
        k, v = keys[head // group].double(), values[head // group].double()
        for i in range(n):
            last = length - n + i
            first = 0 if window is None else max(0, last - window + 1)
            scores = k[first : last + 1] @ query[head, i].double() * 0.3
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            out[i, head] = scores.softmax(0) @ v[first : last + 1]
    return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_pieces_and_rows(heads: int, kv_heads: int, window: int | None, softcap: float | None, mode: str) -> None:
    torch.manual_seed(0)
    for n, lengths in [(7, [7]), (7, [20]), (1, [1]), (1, [33, 1, 6])]:
        query = torch.randn(len(lengths), heads, n, HEAD_DIM)
        keys = [torch.randn(1, kv_heads, length, HEAD_DIM) for length in lengths]
        values = [torch.randn(1, kv_heads, length, HEAD_DIM) for length in lengths]
        views = SessionViews(keys, values, {}, mode)
        out, _ = session_attention(
            MODULE, query, views, views, None, scaling=0.3, sliding_window=window, softcap=softcap, position_ids=1
        )
        assert out.shape == (len(lengths), n, heads, HEAD_DIM)
        for i in range(len(lengths)):
            expected = slow(query[i], keys[i][0], values[i][0], window, softcap)
            torch.testing.assert_close(out[i].double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("mode", "dtype", "device", "masked", "grouped"),
    [
        ("auto", torch.float32, "cpu", True, False),
        ("auto", torch.bfloat16, "cpu", False, True),
        ("auto", torch.float32, "cuda", True, True),
        ("auto", torch.float32, "cuda", False, True),
        ("auto", torch.bfloat16, "cuda", True, True),
        ("auto", torch.bfloat16, "cuda", False, False),
        ("grouped", torch.float32, "cpu", False, True),
        ("sdpa", torch.bfloat16, "cuda", True, False),
    ],
)
def test_t3_where_pieces_are_grouped(mode: str, dtype: torch.dtype, device: str, masked: bool, grouped: bool) -> None:
    assert groups_pieces(mode, dtype, device, masked=masked) == grouped


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("length", [12, 40], ids=["first piece", "continued"])
def test_t3_the_way_that_was_chosen_is_taken(length: int, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped, the kernel sees as many heads as there are keys and values, and is not asked to copy those."""
    seen: list[tuple[int, bool]] = []

    def kernel(query: torch.Tensor, *args: torch.Tensor, enable_gqa: bool = False, **more: Any) -> torch.Tensor:
        seen.append((query.shape[1], enable_gqa))
        return scaled_dot_product_attention(query, *args, enable_gqa=enable_gqa, **more)

    def choose(mode: str, dtype: torch.dtype, device: str, *, masked: bool) -> bool:
        assert (mode, dtype, device, masked) == ("auto", torch.float32, "cpu", length != 12)
        return grouped

    monkeypatch.setattr(attention, "groups_pieces", choose)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", kernel)
    torch.manual_seed(0)
    query, keys, values = (torch.randn(1, heads, n, HEAD_DIM) for heads, n in ((6, 12), (2, length), (2, length)))
    out, _ = session_attention(MODULE, query, *[SessionViews([keys], [values], {}, "auto")] * 2, None, scaling=0.3)
    assert seen == [(2, False)] if grouped else [(6, True)]
    torch.testing.assert_close(out[0].double(), slow(query[0], keys[0], values[0], None, None), atol=1e-5, rtol=1e-4)


def test_the_settings_take_the_modes_there_are() -> None:
    for mode in MODES:
        read_settings(environ={"SWARM_SERVE_ATTENTION": mode})
    with pytest.raises(InvalidRequest, match=f"must be one of {', '.join(MODES)}"):
        read_settings(environ={"SWARM_SERVE_ATTENTION": "flash"})


def test_what_it_does_not_compute_is_refused() -> None:
    x = torch.zeros(1, 1, 1, HEAD_DIM)
    views = SessionViews([x], [x], {})
    with pytest.raises(StageFailed, match="head_mask"):
        session_attention(MODULE, x, views, views, None, head_mask=torch.zeros(1))
    with pytest.raises(StageFailed, match="attention_mask"):
        session_attention(MODULE, x, views, views, torch.zeros(1))


def test_the_mode_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_mode() == "auto"
    monkeypatch.setenv("SWARM_SERVE_ATTENTION", "flash")
    with pytest.raises(LoadRefused, match="'flash'; allowed are auto, grouped, sdpa"):
        attention_mode()
