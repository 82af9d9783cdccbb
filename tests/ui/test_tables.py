"""The CLI's tables as printed: plain where the output is no terminal, literal where a name plays tricks."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from swarmnode.ui import quantities
from swarmnode.ui.load_progress import load_lines, load_view
from swarmnode.ui.plan_table import plan_view
from swarmnode.ui.tables import NO_MODELS, NO_RINGS, models_table, ps_view, status_view

if TYPE_CHECKING:
    from rich.console import RenderableType


def shown(view: RenderableType, *, terminal: bool = False, width: int = 110, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False, **options)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


STAGES = [
    {
        "stage": 0,
        "peer": "pc-1",
        "layers": [0, 14],
        "weight_bytes": 150 << 20,
        "phase": "ready",
        "done": 0,
        "total": 0,
        "sessions": 2,
        "kv_tokens": 1234,
        "kv_bytes": 3 << 20,
        "device": "cpu",
        "threads": 2,
    },
    {
        "stage": 1,
        "peer": "pc-2",
        "layers": [15, 29],
        "weight_bytes": 148 << 20,
        "phase": "fetching",
        "done": 43 << 20,
        "total": 100 << 20,
        "sessions": 0,
        "kv_tokens": 0,
        "kv_bytes": 0,
    },
]
RING = {
    "id": "smollm2-135m-instruct",
    "state": "loading",
    "dtype": "bfloat16",
    "context_tokens": 2048,
    "requests": 3,
    "running": 2,
    "waiting": 1,
    "kv_reserved_tokens": 1500,
    "kv_tokens": 8192,
    "stages": STAGES,
}
NODES = {
    "coordinator": {"node": "n0", "name": "desk", "roles": ["coordinator"], "state": "alive"},
    "peers": [
        {
            "node": "n1",
            "name": "pc-1",
            "roles": ["peer"],
            "state": "alive",
            "address": "127.0.0.1:7702",
            "route": "polled",
            "silence_s": 0.42,
            "memory_bytes": 6 << 30,
            "device": "cpu",
            "threads": 2,
            "stages": [{}],
        },
        {"node": "n2", "name": None, "roles": [], "state": "suspect", "silence_s": 3.0},
    ],
    "rings": [RING],
}


def test_models() -> None:
    answer = {
        "models": [
            {
                "id": "smollm2-135m-instruct",
                "state": "ready",
                "parameters": 134_515_008,
                "layers": 30,
                "num_stages": 1,
                "dtype": "float32",
                "size_bytes": 538_060_032,
                "context_tokens": 2048,
            },
            {"id": "big", "state": "available", "parameters": 14_768_307_200},
        ]
    }
    lines = shown(models_table(answer)).splitlines()
    assert [line.split() for line in lines] == [
        ["MODEL", "STATE", "PARAMETERS", "SIZE", "DTYPE", "CONTEXT", "LAYERS", "SHARDS"],
        [lines[1].strip()],
        ["big", "available", "14.8B", "-", "-", "-", "-", "-"],
        ["smollm2-135m-instruct", "ready", "135M", "513", "MiB", "float32", "2,048", "30", "1"],
    ]


def test_no_models() -> None:
    assert shown(models_table({"models": []})) == NO_MODELS


def test_ps() -> None:
    text = shown(ps_view(NODES))
    rows = [line.split() for line in text.splitlines()]
    assert ["desk", "alive", "coordinator", "-", "-", "-", "-", "-", "-", "-"] in rows
    assert ["pc-1", "alive", "peer", "6.0", "GiB", "1", "127.0.0.1:7702", "cpu", "0.4", "s", "2", "polled"] in rows
    assert ["n2", "suspect", "-", "-", "-", "-", "-", "3.0", "s", "-", "-"] in rows
    assert ["0", "pc-1", "0-14", "ready", "2", "150", "MiB", "1,234", "3.0", "MiB", "cpu", "2"] in rows
    assert ["1", "pc-2", "15-29", "fetching", "43%", "0", "148", "MiB", "0", "0", "B", "-", "-"] in rows
    assert ["layers", "#" * 15 + "." * 15] in rows
    assert "smollm2-135m-instruct loading  bfloat16 · 3 requests · 2 running, 1 waiting · KV 1,500 of 8,192" in text


def test_a_ring_with_quantized_stages_says_whose_kernels_serve_them() -> None:
    assert "KERNELS" not in shown(ps_view(NODES))
    quantized = {**RING, "stages": [{**STAGES[0], "kernels": "fastcpu"}, STAGES[1]]}
    rows = [line.split() for line in shown(ps_view({**NODES, "rings": [quantized]}), width=130).splitlines()]
    assert next(row for row in rows if "KERNELS" in row)[-1] == "KERNELS"
    assert [row[-1] for row in rows if row[:2] in (["0", "pc-1"], ["1", "pc-2"])] == ["fastcpu", "-"]


def test_each_lane_says_how_it_travels() -> None:
    act = {"lane": "act", "route": "polled", "round_trip_ms": 41.25, "mbit_per_s": 9.5, "compressed": True}
    act |= {"frames": 1200, "bytes": 3 << 20, "relayed_frames": 2400, "relayed_bytes": 4 << 20}
    pre = {"lane": "pre", "route": "direct", "round_trip_ms": None, "mbit_per_s": None, "compressed": False}
    ready = {**RING, "state": "ready", "stages": [{**STAGES[0], "links": [act, pre]}, {**STAGES[1], "links": []}]}
    rows = [line.split() for line in shown(status_view(ready)).splitlines()]
    polled = ["0", "act", "polled", "41.2", "ms", "9.5", "Mbit/s", "1,200", "3.0", "MiB", "yes", "4.0", "MiB", "2,400"]
    assert polled in rows
    assert ["0", "pre", "direct", "-", "-", "-", "-", "no", "-", "-"] in rows


def test_memory_of_a_ring_as_planned_measured_parked_and_paused() -> None:
    ring = RING | {"kv_tokens_planned": 8192, "parked": 0, "kv_parked_tokens": 0, "paused": 0}
    text = shown(status_view(ring), width=200)
    assert "planned" not in text
    assert "parked" not in text
    assert "paused" not in text
    less = ring | {"kv_tokens": 6000, "parked": 2, "kv_parked_tokens": 1200, "paused": 1}
    text = shown(status_view(less), width=200)
    assert "1 paused · KV 1,500 of 6,000 tokens reserved (8,192 planned), 1,200 parked in 2 conversations" in text


def test_a_peer_that_was_told_nothing_says_auto() -> None:
    peer = {"node": "n1", "name": "pc-1", "roles": ["peer"], "state": "alive", "device": "auto", "threads": 0}
    rows = [line.split() for line in shown(ps_view({"coordinator": None, "peers": [peer], "rings": []})).splitlines()]
    assert ["pc-1", "alive", "peer", "-", "-", "-", "auto", "-", "auto", "-"] in rows


def test_ps_says_who_coordinates_and_which_voters_are_there() -> None:
    """After a failover the first coordinator and another voter are no members: one is back, one is not."""
    den = {"node": "n1", "name": "den", "roles": ["peer"], "state": "alive"}
    links = [
        {"node": "n0", "name": "desk", "up": True},
        {"node": "n2", "name": "attic", "up": False},
        {"node": "n3", "name": "hall", "up": True},
    ]
    hall = {"node": "n3", "name": "hall", "roles": ["peer"], "state": "alive"}
    answer = {"coordinator": den, "peers": [den, hall], "voters": ["den", "desk", "attic", "hall"]}
    rows = [line.split() for line in shown(ps_view(answer | {"voter_links": links})).splitlines()]
    named = {row[0]: row[1:3] for row in rows if row and row[0] in ("den", "desk", "attic", "hall")}
    assert named == {
        "den": ["alive", "peer+coordinates"],
        "desk": ["alive", "voter"],
        "attic": ["away", "voter"],
        "hall": ["alive", "peer"],
    }


def test_ps_marks_a_straggler() -> None:
    peers = [{"name": name, "state": "alive", "straggles": name == "den"} for name in ("den", "desk")]
    rows = [line.split() for line in shown(ps_view({"coordinator": None, "peers": peers, "rings": []})).splitlines()]
    marked = {row[0]: row[1:3] for row in rows if row and row[0] in ("den", "desk")}
    assert marked == {"den": ["alive", "slow"], "desk": ["alive", "-"]}


@pytest.mark.parametrize("width", [80, 60])
def test_a_narrow_terminal_loses_columns_not_letters(width: int) -> None:
    text = shown(ps_view(NODES), width=width)
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    assert {"NODE", "STATE", "MEMORY", "alive", "PEER", "fetching"} <= set(text.split())
    assert "THREADS" not in text


def test_a_coordinator_that_is_also_a_peer_is_one_line() -> None:
    me = {"node": "n1", "name": "both", "roles": ["coordinator", "peer"], "state": "alive"}
    text = shown(ps_view({"coordinator": me, "peers": [{**me, "memory_bytes": 1 << 30}], "rings": []}))
    assert text.count("both") == 1


def test_ps_without_rings() -> None:
    assert shown(ps_view({"coordinator": None, "peers": [], "rings": []})).splitlines()[-1] == NO_RINGS


def test_a_ready_ring_needs_no_coverage_line() -> None:
    ready = {**RING, "state": "ready", "stages": [{**stage, "phase": "ready"} for stage in STAGES]}
    text = shown(status_view(ready))
    assert "layers " not in text
    assert "%" not in text


def test_an_error_is_shown_in_full() -> None:
    status = {"id": "m", "state": "lost", "error": {"code": "stage_lost", "message": "[bold]pc-2[/] went away"}}
    assert shown(status_view(status)).splitlines() == ["m lost", "stage_lost: [bold]pc-2[/] went away"]


def test_names_are_literal_and_cannot_move_the_cursor() -> None:
    answer = {"peers": [{"name": "[red]x\x1b[2J", "state": "alive", "roles": ["peer"]}]}
    text = shown(ps_view(answer), terminal=True)
    assert "[red]x?[2J" in text
    assert "\x1b[2J" not in text


@pytest.mark.parametrize("view", [models_table, ps_view, status_view, load_view])
def test_missing_keys_are_dashes_not_errors(view: Any) -> None:
    answer = {"models": [{}], "peers": [{}], "rings": [{"stages": [{}]}], "stages": [{}]}
    assert "-" in shown(view(answer))
    shown(view({}))


@pytest.mark.parametrize("options", [{"terminal": False}, {"terminal": True, "no_color": True}])
def test_no_colours_where_none_are_wanted(options: dict[str, Any]) -> None:
    text = shown(ps_view(NODES), **options)
    assert "\x1b[32m" not in text
    assert "\x1b[33m" not in text
    assert "\x1b[32m" in shown(ps_view(NODES), terminal=True, color_system="standard")


def test_load_lines() -> None:
    assert load_lines(RING) == [
        "stage 0  pc-1  layers 0-14  ready",
        "stage 1  pc-2  layers 15-29  fetching  43% of 100 MiB",
    ]
    loading = {"stages": [{**STAGES[1], "phase": "loading", "done": 3, "total": 15}]}
    assert load_lines(loading) == ["stage 1  pc-2  layers 15-29  loading  20%"]
    assert load_lines({"id": "m", "state": "loading", "stages": []}) == ["m: loading"]


def test_load_view_has_a_bar_a_stage() -> None:
    lines = shown(load_view(RING)).splitlines()
    assert len(lines) == 2
    bars = [sum(char in "━╸╺-" for char in line) for line in lines]
    assert bars[0] > bars[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (150 << 20, "150 MiB"), (1 << 62, "4096 PiB"), (None, "-")],
)
def test_sizes(value: int | None, text: str) -> None:
    assert quantities.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(5, "5"), (1500, "2K"), (134_515_008, "135M"), (14_768_307_200, "14.8B"), (None, "-")]
)
def test_parameters(value: int | None, text: str) -> None:
    assert quantities.parameters(value) == text


def test_layer_ranges() -> None:
    assert [quantities.layers(pair) for pair in ([0, 14], [3, 3], None, [])] == ["0-14", "3", "-", "-"]


def test_l5_a_plan_says_what_every_stage_needs_part_by_part() -> None:
    stage = {"stage": 0, "peer": "pc-1", "layers": [0, 14], "need_bytes": 900 << 20, "offered_bytes": 2 << 30}
    stage |= {"layer_bytes": 150 << 20, "kv_bytes": 90 << 20, "headroom_bytes": 150 << 20}
    plan = {"id": "m", "dtype": "bfloat16", "quantization": "nf4", "context_tokens": 2048, "kv_tokens": 4096}
    plan |= {"max_in_flight": 4, "notice": "served with nf4", "stages": [stage]}
    lines = shown(plan_view(plan), width=200).splitlines()
    assert lines[0] == (
        "m planned, nothing is loaded  bfloat16 · nf4 · context 2,048 · KV for 4,096 tokens · 4 in flight"
    )
    assert all(text in lines[-2] for text in ("pc-1", "0-14", "900 MiB", "2.0 GiB", "150 MiB", "90.0 MiB"))
    assert lines[-1] == "served with nf4"
    assert "a token" not in lines[0]
    lines = shown(plan_view(plan | {"evicts": ["old", "older"]}), width=200).splitlines()
    assert lines[-2] == "it would take the place of old, older"
    assert "900 MiB" in shown(plan_view(plan), width=70)


def test_a_plan_says_how_fast_it_is_and_why_peers_were_left_out() -> None:
    left_out = [{"node": "n", "peer": "cellar\x1b[2J", "reason": "slower", "why": "measured slower: [b]90.0 ms[/b]"}]
    left_out += [{"node": "n", "peer": f"pc-{i}", "reason": "not_needed", "why": "not needed"} for i in range(9)]
    plan = {"id": "m", "stages": [], "predicted": {"round_ms": 23.04, "bottleneck_ms": 20.0}, "left_out": left_out}
    lines = shown(plan_view(plan), width=200).splitlines()
    assert lines[0].endswith("about 23.0 ms a token")
    assert [line for line in lines if line.startswith("without cellar")] == [
        "without cellar?[2J: measured slower: [b]90.0 ms[/b]"
    ]
    assert lines[-2:] == ["without pc-6: not needed", "without 2 more; --json lists them"]


def test_ps_says_what_became_of_a_ring_that_was_lost() -> None:
    lost = {"id": "house-1", "state": "lost", "error": {"code": "stage_lost", "message": "stage 1's worker died"}}
    text = shown(ps_view({"coordinator": None, "peers": [], "rings": [], "lost": [lost]}))
    assert "house-1 lost" in text
    assert "stage 1's worker died" in text
    assert NO_RINGS not in text


def test_a_lost_ring_says_what_it_waits_for() -> None:
    again = {"stage": 1, "waits_for": "2 free peers\x1b[2J", "next_try_s": 12.4, "failures": 1}
    status = {"id": "m", "state": "restoring", "error": {"code": "stage_lost", "message": "gone"}, "restoring": again}
    lines = shown(status_view(status)).splitlines()
    assert lines[0] == "m restoring"
    assert lines[-1] == "lost: stage 1 · waits for: 2 free peers?[2J · next try in 12 s · 1 try failed"
    text = shown(status_view(status | {"restoring": {**again, "waits_for": "", "next_try_s": None, "failures": 0}}))
    assert text.splitlines()[-1] == "lost: stage 1 · is being loaded again"


def test_a_cards_memory_is_shown_where_somebody_has_a_card() -> None:
    peers = [{"name": "den", "vram_bytes": 8 << 30, "vram_free_bytes": 5 << 30}, {"name": "attic"}]
    text = shown(ps_view({"coordinator": None, "peers": peers, "rings": []}), width=160)
    assert "VRAM FREE" in text
    assert "5.0 GiB of 8.0 GiB" in text
    assert "VRAM" not in shown(ps_view({"coordinator": None, "peers": peers[1:], "rings": []}), width=160)
