"""`top` as a screen: golden texts at several sizes, and what holds at every size and after every key."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from swarmnode.ui.sparkline import sparkline
from swarmnode.ui.top import Size, once, render, shared_lines
from swarmnode.ui.top_view import BACK, DETAILS, DOWN, ENTER, OVERVIEW, SECTION, SECTIONS, TAB, UP, History, View, press

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

GOLDEN = Path(__file__).parent / "golden"
NOW = 1_800_000_000.0


def node(name: str, **more: Any) -> dict[str, Any]:
    return {"node": f"id-of-{name}", "name": name, "roles": ["peer"], "state": "alive", "route": "direct", **more}


def lane(name: str, route: str, round_trip_ms: float | None, n_bytes: int) -> dict[str, Any]:
    return {"lane": name, "route": route, "round_trip_ms": round_trip_ms, "bytes": n_bytes, "frames": n_bytes // 100}


def stage(number: int, peer: str, layers: list[int], phase: str = "ready", **more: Any) -> dict[str, Any]:
    return {"stage": number, "peer": peer, "layers": layers, "phase": phase, "sessions": 0, "kv_tokens": 0, **more}


SERVING = {
    "id": "smollm2-135m-instruct",
    "state": "ready",
    "dtype": "bfloat16",
    "running": 2,
    "waiting": 1,
    "paused": 0,
    "parked": 3,
    "tokens_per_s": 41.5,
    "kv_tokens": 8192,
    "kv_reserved_tokens": 4096,
    "kv_parked_tokens": 1024,
    "stages": [
        stage(
            0,
            "den",
            [0, 14],
            sessions=5,
            kv_tokens=3000,
            device="cpu",
            links=[lane("act", "direct", 1.25, 3 << 20), lane("pre", "relayed", 31.0, 9 << 20)],
        ),
        stage(
            1, "attic", [15, 29], sessions=5, kv_tokens=3000, device="cuda:0", links=[lane("tok", "polled", None, 999)]
        ),
    ],
}
LOADING = {
    "id": "qwen3-8b",
    "state": "loading",
    "kv_tokens": 4096,
    "stages": [
        stage(0, "cellar", [0, 35], "fetching", done=43 << 20, total=100 << 20),
    ],
}
BUSY = {
    "coordinator": {"node": "n0", "name": "desk", "roles": ["coordinator"], "state": "alive"},
    "peers": [
        node(
            "den", silence_s=0.4, memory_bytes=6 << 30, device="cpu", threads=2, address="192.168.1.7:7702", stages=[{}]
        ),
        node("attic", silence_s=1.9, memory_bytes=24 << 30, device="cuda:0", route="polled", stages=[{}]),
        node("cellar", silence_s=4.2, state="suspect", memory_bytes=16 << 30, device="cpu", stages=[{}]),
    ],
    "rings": [SERVING, LOADING],
    "lost": [
        {"id": "old", "state": "lost", "error": {"code": "stage_lost", "message": "[bold]den[/] went away\x1b[2J"}}
    ],
    "requests": [
        {"request": "aaaa1111", "model": "smollm2-135m-instruct", "phase": "decode", "prompt_tokens": 200, "tokens": 96}
        | {"tokens_per_s": 20.5, "age_s": 6.2},
        {"request": "bbbb2222", "model": "smollm2-135m-instruct", "phase": "decode", "prompt_tokens": 12, "tokens": 130}
        | {"tokens_per_s": 21.0, "age_s": 6.1},
        {"request": "cccc3333", "model": "smollm2-135m-instruct", "phase": "queued", "prompt_tokens": 0, "tokens": 0}
        | {"tokens_per_s": 0.0, "age_s": 0.4},
    ],
    "events": [
        {"time": NOW - 7300, "event": "peer_joined", "name": "den"},
        {"time": NOW - 400, "event": "ring_idle", "model": "old", "idle_s": 900},
        {"time": NOW - 90, "event": "ring_ready", "model": "smollm2-135m-instruct"},
        {"time": NOW - 3, "event": "ring_over", "model": "old", "error": "its peer went away"},
        {"time": NOW - 2, "event": "of_tomorrow", "answer": 42},
        {"time": NOW - 1, "event": "peer_joined"},
    ],
    "carried": {"tunnels": 2, "polled": 1},
    "traffic": [{"kind": "relayed", "peer": "x", "ring": "r", "lane": "pre", "bytes_in": 0, "bytes_out": 9 << 20}],
}
EMPTY: dict[str, Any] = {"coordinator": {"name": "desk", "state": "alive"}, "peers": [], "rings": [], "events": []}


def history() -> History:
    seen = History()
    for second in range(20):
        traffic = [{"kind": "relayed", "bytes_in": 0, "bytes_out": (2 << 10) * second**2}]
        ring = {**SERVING, "tokens_per_s": float(second % 7), "kv_reserved_tokens": 400 * second}
        seen.note({"rings": [ring], "traffic": traffic}, float(second))
    return seen


def drawn(screen: RenderableType, width: int, **options: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=100, highlight=False, **options)
    console.print(screen, end="")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().split("\n")


def screen(snapshot: Mapping[str, Any], width: int, height: int, view: View, **more: Any) -> list[str]:
    return drawn(render(snapshot, Size(width, height), view, history(), now_unix_s=NOW, **more), width)


CASES = {
    "overview_80x24": (BUSY, 80, 24, View()),
    "overview_120x36": (BUSY, 120, 36, View()),
    "overview_60x12": (BUSY, 60, 12, View()),
    "empty_80x24": (EMPTY, 80, 24, View()),
    "requests_by_tokens_80x12": (BUSY, 80, 12, View(SECTION, "requests", 1, "tokens")),
    "events_80x10": (BUSY, 80, 10, View(SECTION, "events", 5)),
    "ring_80x24": (BUSY, 80, 24, View(DETAILS, "rings", 0)),
    "node_80x16": (BUSY, 80, 16, View(DETAILS, "nodes", 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    """The screen as text; where a change is meant, look at it and write it down."""
    lines = [line.rstrip() for line in screen(*CASES[name])]
    assert "\n".join(lines) + "\n" == (GOLDEN / f"top_{name}.txt").read_text(encoding="utf-8")


def test_once_shows_everything_and_no_colour_where_there_is_no_terminal() -> None:
    text = "\n".join(drawn(once(BUSY, now_unix_s=NOW), 200))
    for shown in ("cellar", "suspect", "qwen3-8b", "43%", "cccc3333", "of_tomorrow answer=42", "KV 33%, 8% parked"):
        assert shown in text
    assert "\x1b" not in text, "names and errors cannot move the cursor"


def test_colours_on_a_terminal_and_none_with_no_color() -> None:
    full = render(BUSY, Size(80, 24), View(), history(), now_unix_s=NOW)
    assert "\x1b[32m" in "".join(drawn(full, 80, force_terminal=True, color_system="standard"))
    bare = "".join(drawn(full, 80, force_terminal=True, no_color=True))
    assert "\x1b[32m" not in bare
    assert "den" in bare


def test_a_coordinator_that_is_away_takes_the_place_of_the_keys() -> None:
    lines = screen(BUSY, 80, 24, View(), notice="as of 7 s ago: no swarmnode API at http://127.0.0.1:7701")
    assert lines[-1].startswith("as of 7 s ago")
    assert "den" in "".join(lines)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 140),
    st.integers(1, 50),
    st.builds(View, st.integers(0, 2), st.sampled_from(SECTIONS), st.integers(0, 8)),
    st.sampled_from([BUSY, EMPTY, {}]),
)
def test_every_size_is_filled_and_never_exceeded(width: int, height: int, view: View, snapshot: Any) -> None:
    lines = screen(snapshot, width, height, view)
    assert len(lines) == height
    assert all(cell_len(line) <= width for line in lines)
    if height > 3 and width > 10:
        assert lines[-1].startswith("q quit"), "the keys are never pushed out"


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(-3, 100))
def test_lines_are_shared_so_that_they_fit(wanted: list[int], room: int) -> None:
    given_lines = shared_lines(wanted, room)
    assert sum(given_lines) <= max(0, room)
    assert all(0 <= have <= want for have, want in zip(given_lines, wanted, strict=True))
    if sum(wanted) <= room:
        assert given_lines == wanted


def test_the_marked_row_stays_in_sight() -> None:
    peers = [node(f"pc-{number:02}") for number in range(60)]
    lines = screen({**BUSY, "peers": peers}, 80, 12, View(SECTION, "nodes", 40))
    assert "NODE" in lines[2]
    assert [line for line in lines if "pc-39" in line], "row 40 beside the coordinator's"


# keys


def keys(*pressed: str, start: View | None = None) -> View | None:
    view = start or View()
    for key in pressed:
        found = press(view, key, BUSY)
        if found is None:
            return None
        view = found
    return view


def test_q_leaves_from_everywhere() -> None:
    assert keys("q") is None
    assert keys("n", ENTER, "q") is None


def test_sections_rows_and_details() -> None:
    assert keys("n") == View(SECTION, "nodes", 0)
    assert keys("n", DOWN, DOWN) == View(SECTION, "nodes", 2)
    assert keys("n", UP) == View(SECTION, "nodes", 0)
    assert keys("n", *[DOWN] * 9) == View(SECTION, "nodes", 3), "four nodes, the coordinator among them"
    assert keys("r", ENTER) == View(DETAILS, "rings", 0)
    assert keys("r", ENTER, BACK, BACK, BACK) == View(OVERVIEW, "rings", 0)
    assert keys("t", ENTER) == View(SECTION, "requests", 0), "there is no more to show of a request"
    assert keys(TAB) == View(SECTION, "requests", 0)
    assert keys("x", "\ufffd") == View()


def test_sorting_goes_round() -> None:
    assert keys("s") == View(sort="tokens/s")
    assert keys("s", "s", "s", "s") == View()
    lines = screen(BUSY, 80, 12, View(SECTION, "requests", 0, "age"))
    assert [line[:8] for line in lines[3:6]] == ["aaaa1111", "bbbb2222", "cccc3333"]
    lines = screen(BUSY, 80, 12, View(SECTION, "requests", 0, "tokens/s"))
    assert [line[:8] for line in lines[3:6]] == ["bbbb2222", "aaaa1111", "cccc3333"]


# series


def test_sparklines_show_the_newest_values_and_stay_as_wide_as_asked() -> None:
    assert sparkline([0, 1, 2, 4, 8], 4) == "▂▃▅█"
    assert sparkline([8], 3) == "  █"
    assert sparkline([0, 0], 2) == "▁▁"
    assert sparkline([0.5, 1.0, 2.0], 3, most=1.0) == "▅██"
    assert sparkline([0, 1, 2], 3, ascii_only=True) == "_=#"
    assert sparkline([], 0) == ""


def test_relayed_bytes_become_a_rate_and_a_ring_that_is_gone_is_no_negative_one() -> None:
    seen = History()
    for at, n_bytes in ((0.0, 1000), (2.0, 3000), (3.0, 0), (4.0, 500)):
        seen.note({"traffic": [{"kind": "relayed", "bytes_in": n_bytes, "bytes_out": 0}]}, at)
    assert list(seen.relay_bytes_per_s) == [1000.0, 0.0, 500.0]
