"""What `top` shows and what keys do to it: the view as a value, and the series behind the sparklines."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SECTIONS = ("nodes", "rings", "requests", "events")
SORTS = ("age", "tokens/s", "tokens", "model")
KEPT = 240
"""Points of a series: four minutes at one a second, more than any terminal is wide in its header."""

OVERVIEW, SECTION, DETAILS = range(3)
UP, DOWN, ENTER, BACK, TAB = "up", "down", "enter", "back", "tab"


@dataclass(frozen=True, slots=True)
class View:
    """Where one is: the overview, one section over the whole screen, or one row of it in full."""

    depth: int = OVERVIEW
    section: str = "rings"
    row: int = 0
    sort: str = SORTS[0]


def press(view: View, key: str, snapshot: Mapping[str, Any]) -> View | None:
    """The view after a key; None: leave. An unknown key changes nothing."""
    letters = {name[0]: name for name in ("nodes", "rings", "events")} | {"t": "requests"}
    if key == "q":
        return None
    if key in letters:
        return View(SECTION, letters[key], 0, view.sort)
    if key == "s":
        return replace(view, sort=SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)])
    if key == BACK:
        return replace(view, depth=max(OVERVIEW, view.depth - 1))
    if key == TAB:
        return replace(view, section=SECTIONS[(SECTIONS.index(view.section) + 1) % len(SECTIONS)], row=0, depth=SECTION)
    if key == ENTER:
        return _deeper(view, snapshot)
    if key in (UP, DOWN) and view.depth != DETAILS:
        last = max(0, len(rows_of(snapshot, view)) - 1)
        return replace(view, depth=SECTION, row=min(last, max(0, view.row + (1 if key == DOWN else -1))))
    return view


def _deeper(view: View, snapshot: Mapping[str, Any]) -> View:
    if view.depth == OVERVIEW:
        return replace(view, depth=SECTION)
    has_details = view.section in ("nodes", "rings") and view.row < len(rows_of(snapshot, view))
    return replace(view, depth=DETAILS) if has_details else view


def rows_of(snapshot: Mapping[str, Any], view: View) -> Sequence[Mapping[str, Any]]:
    """The rows of the view's section, in the order in which they are shown."""
    match view.section:
        case "nodes":
            return nodes_of(snapshot)
        case "rings":
            return [*(snapshot.get("rings") or []), *(snapshot.get("lost") or [])]
        case "requests":
            return sorted_requests(snapshot, view.sort)
        case _:
            return (snapshot.get("events") or [])[::-1]


def nodes_of(snapshot: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The coordinator, unless it is a peer too, and the peers by name."""
    coordinator, peers = snapshot.get("coordinator"), snapshot.get("peers") or []
    alone = coordinator and all(peer.get("node") != coordinator.get("node") for peer in peers)
    return [*([coordinator] if alone else []), *sorted(peers, key=lambda peer: str(peer.get("name")))]


def sorted_requests(snapshot: Mapping[str, Any], sort: str) -> list[Mapping[str, Any]]:
    requests = list(snapshot.get("requests") or [])
    key = {"age": "age_s", "tokens/s": "tokens_per_s", "tokens": "tokens"}.get(sort)
    if key is None:
        return sorted(requests, key=lambda one: (str(one.get("model")), str(one.get("request"))))
    return sorted(requests, key=lambda one: (-(one.get(key) or 0), str(one.get("request"))))


@dataclass(slots=True)
class History:
    """Series over the snapshots that were seen: tokens a second, the KV's reserved share, relayed bytes a second."""

    tokens_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    kv_share: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    relay_bytes_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _relayed: tuple[float, int] | None = None

    def note(self, snapshot: Mapping[str, Any], now: float) -> None:
        """`now`: seconds of any steady clock."""
        rings = snapshot.get("rings") or []
        self.tokens_per_s.append(sum(ring.get("tokens_per_s") or 0.0 for ring in rings))
        budget = sum(ring.get("kv_tokens") or 0 for ring in rings)
        self.kv_share.append(sum(ring.get("kv_reserved_tokens") or 0 for ring in rings) / budget if budget else 0.0)
        relayed = relayed_bytes(snapshot)
        if self._relayed is not None and now > self._relayed[0]:
            self.relay_bytes_per_s.append(max(0.0, (relayed - self._relayed[1]) / (now - self._relayed[0])))
        self._relayed = now, relayed


def relayed_bytes(snapshot: Mapping[str, Any]) -> int:
    """What the coordinator's relay carried, both ways, for the rings that are there."""
    routes = snapshot.get("traffic") or []
    return sum(route["bytes_in"] + route["bytes_out"] for route in routes if route.get("kind") == "relayed")
