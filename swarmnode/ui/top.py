"""`swarmnode top` as a pure function: a snapshot of `GET /api/v1/nodes`, a view and a size in, a full screen out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from swarmnode.ui import quantities
from swarmnode.ui.fitted_table import FittedTable
from swarmnode.ui.sentences import sentence
from swarmnode.ui.sparkline import sparkline
from swarmnode.ui.tables import absence, literal, node_state, restoring_text, stage_phase, state_text, status_view
from swarmnode.ui.top_view import DETAILS, OVERVIEW, SECTIONS, History, View, nodes_of, rows_of, sorted_requests

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

KEYS = "q quit  n nodes  r rings  t requests  e events  enter open  esc back  s sort"
HEADER_LINES, FOOTER_LINES = 2, 1
LEAST_LINES = 2
"""Of a section in the overview: its titles and one row."""
SPARK_COLUMNS = 12
_SELECTED = Style(reverse=True)


@dataclass(frozen=True, slots=True)
class Size:
    width: int
    height: int


def render(
    snapshot: Mapping[str, Any],
    size: Size,
    view: View | None = None,
    history: History | None = None,
    *,
    now_unix_s: float = 0.0,
    notice: str = "",
) -> RenderableType:
    """Exactly `size.height` lines of at most `size.width` columns. `notice` stands in the place of the keys."""
    return _Screen(snapshot, size, view or View(), history or History(), now_unix_s, notice)


def once(snapshot: Mapping[str, Any], *, now_unix_s: float) -> RenderableType:
    """All sections in full, for an output that is no terminal."""
    screen = _Screen(snapshot, Size(0, 0), View(), History(), now_unix_s, "")
    return Group(*(part for section in SECTIONS for part in (screen.section(section), Text())), screen.totals())


@dataclass(frozen=True, slots=True)
class _Screen:
    snapshot: Mapping[str, Any]
    size: Size
    view: View
    history: History
    now_unix_s: float
    notice: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(width=self.size.width, height=None)
        room = max(0, self.size.height - HEADER_LINES - FOOTER_LINES)
        body = self._overview(console, options, room) if self.view.depth == OVERVIEW else self._one(console, options)
        lines = [
            *_lines(console, options, self._title())[:1],
            *_lines(console, options, self.totals(ascii_only=options.ascii_only))[:1],
            *body[:room],
        ]
        lines += [[] for _ in range(self.size.height - FOOTER_LINES - len(lines))]
        lines += _lines(console, options, self._footer())[:FOOTER_LINES]
        for number, line in enumerate(lines[: self.size.height]):
            yield from line
            if number < self.size.height - 1:
                yield Segment.line()

    # the frame

    def _title(self) -> Text:
        coordinator = self.snapshot.get("coordinator") or {}
        peers, rings = self.snapshot.get("peers") or [], self.snapshot.get("rings") or []
        requests = self.snapshot.get("requests") or []
        line = Text(no_wrap=True, overflow="ellipsis")
        if absent := absence(self.snapshot):
            return line.append(f"swarmnode top  {absent}", style="yellow")
        line.append("swarmnode top  ", style="bold").append_text(literal(coordinator.get("name")))
        tunnels = (self.snapshot.get("carried") or {}).get("tunnels") or 0
        counts = ((len(peers), "peer"), (len(rings), "ring"), (len(requests), "request"), (tunnels, "tunnel"))
        line.append("  " + quantities.listed(quantities.plural(n, noun) for n, noun in counts if n or noun != "tunnel"))
        by = f" by {self.view.sort}" if self.view.section == "requests" else ""
        where = "" if self.view.depth == OVERVIEW else f"  > {self.view.section}{by}"
        return line.append(where, style="bold")

    def totals(self, *, ascii_only: bool = False) -> Text:
        """Throughput, KV and the relay, each with its sparkline where there is one."""
        rings, history = self.snapshot.get("rings") or [], self.history
        budget = sum(ring.get("kv_tokens") or 0 for ring in rings)
        reserved, parked = (
            sum(ring.get(key) or 0 for ring in rings) for key in ("kv_reserved_tokens", "kv_parked_tokens")
        )
        speed = sum(ring.get("tokens_per_s") or 0.0 for ring in rings)
        relayed = history.relay_bytes_per_s[-1] if history.relay_bytes_per_s else 0.0
        parts = (
            (f"{speed:.1f} tokens/s", history.tokens_per_s, None),
            (f"KV {_percent(reserved, budget)}, {_percent(parked, budget)} parked", history.kv_share, 1.0),
            (f"relay {quantities.size(relayed)}/s", history.relay_bytes_per_s, None),
        )
        line = Text(no_wrap=True, overflow="crop")
        columns = min(SPARK_COLUMNS, (self.size.width - sum(len(text) + 4 for text, _, _ in parts)) // len(parts))
        for text, series, most in parts:
            line.append(text)
            if len(series) > 1 and columns > 2:
                bars = sparkline(series, columns, most=most, ascii_only=ascii_only)
                line.append(" ").append(bars, style="cyan")
            line.append("   ")
        line.rstrip()
        return line

    def _footer(self) -> Text:
        if self.notice:
            return Text(self.notice, style="yellow", no_wrap=True, overflow="ellipsis")
        return Text(KEYS, style="dim", no_wrap=True, overflow="ellipsis")

    # the sections

    def _overview(self, console: Console, options: ConsoleOptions, room: int) -> list[list[Segment]]:
        """All sections, each with as many lines as it needs or as are its share."""
        rendered = [_lines(console, options, self.section(name)) for name in SECTIONS]
        heights = shared_lines([len(lines) for lines in rendered], room - (len(SECTIONS) - 1))
        found: list[list[Segment]] = []
        for lines, height in zip(rendered, heights, strict=True):
            if found and height:
                found.append([])
            hidden = len(lines) - height
            if hidden and height > LEAST_LINES:
                lines = [*lines[: height - 1], [Segment(f"  … {hidden + 1} more lines", Style(dim=True))]]
            found += lines[:height]
        return found

    def _one(self, console: Console, options: ConsoleOptions) -> list[list[Segment]]:
        """One section over the whole screen with its chosen row marked, or that row in full."""
        rows = rows_of(self.snapshot, self.view)
        has_details = self.view.section in ("nodes", "rings")
        if self.view.depth == DETAILS and has_details and self.view.row < len(rows):
            return _lines(console, options, self._details(rows[self.view.row]))
        lines = _lines(console, options, self.section(self.view.section, marked=self.view.row))
        room = max(1, self.size.height - HEADER_LINES - FOOTER_LINES)
        marked = next((i for i, line in enumerate(lines) if any(s.style and s.style.reverse for s in line)), 0)
        first = max(0, marked - room + 1)
        return lines[:1] + lines[1 + first :] if first else lines

    def section(self, name: str, marked: int | None = None) -> RenderableType:
        match name:
            case "nodes":
                return _nodes(nodes_of(self.snapshot), marked)
            case "rings":
                return _rings(rows_of(self.snapshot, View(section="rings")), marked)
            case "requests":
                return _requests(sorted_requests(self.snapshot, self.view.sort), marked)
            case _:
                return _events(rows_of(self.snapshot, View(section="events")), self.now_unix_s, marked)

    def _details(self, row: Mapping[str, Any]) -> RenderableType:
        return _node_details(row) if self.view.section == "nodes" else status_view(row)


def shared_lines(wanted: Sequence[int], room: int) -> list[int]:
    """Lines for each: what it wants where all fits, else the large ones are cut until it does."""
    given = list(wanted)
    while sum(given) > max(0, room):
        largest = max(range(len(given)), key=lambda index: (given[index], index))
        if given[largest] <= LEAST_LINES:
            given[max(index for index, lines in enumerate(given) if lines)] = 0  # too low for all: the last one goes
            continue
        given[largest] -= 1
    return given


def _nodes(nodes: Sequence[Mapping[str, Any]], marked: int | None) -> FittedTable:
    table = FittedTable(
        "NODE", "STATE", ">MEMORY", ">STAGES", "ROUTE", ">SILENT?", "DEVICE?", "ROLES?", "ADDRESS?", rule=False
    )
    for index, node in enumerate(nodes):
        silence_s, stages = node.get("silence_s"), node.get("stages")
        table.add_row(
            _mark(literal(node.get("name") or node.get("node")), index == marked),
            node_state(node),
            quantities.size(node.get("memory_bytes")),
            "-" if stages is None else str(len(stages)),
            literal(node.get("route")),
            "-" if silence_s is None else f"{silence_s:.1f} s",
            literal(node.get("device")),
            literal("+".join(node.get("roles") or []) or None),
            literal(node.get("address")),
        )
    return table


def _rings(rings: Sequence[Mapping[str, Any]], marked: int | None) -> RenderableType:
    if not rings:
        return Text("RING\nno model is loaded", style="bold")
    parts: list[RenderableType] = []
    for index, ring in enumerate(rings):
        parts.append(_ring_line(ring, index == marked))
        if ring.get("stages"):
            parts.append(_stages(ring))
    return Group(*parts)


def _ring_line(ring: Mapping[str, Any], marked: bool) -> Text:
    """With who is there: 2 running, 1 waiting, 1 paused, 3 parked."""
    line = Text("RING ", style="bold", no_wrap=True, overflow="ellipsis")
    line.append_text(_mark(literal(ring.get("id")), marked)).append(" ").append_text(state_text(ring.get("state")))
    busy = [f"{ring[state]} {state}" for state in ("running", "waiting", "paused", "parked") if ring.get(state)]
    speed = f"{ring['tokens_per_s']:.1f} tokens/s" if ring.get("tokens_per_s") else ""
    budget = ring.get("kv_tokens")
    kept = f"KV {_percent(ring.get('kv_reserved_tokens'), budget)} of {budget:,} tokens" if budget else ""
    error = str((ring.get("error") or {}).get("message") or "")
    again = restoring_text(ring["restoring"]) if ring.get("restoring") else ""
    facts = quantities.listed((*busy, speed, kept, again, error))
    return line.append("  ").append_text(literal(facts, style="not bold"))


def _stages(ring: Mapping[str, Any]) -> FittedTable:
    table = FittedTable(
        "  STAGE", "PEER", "LAYERS", "PHASE", ">SESSIONS", ">KV", "NEXT BY", ">TRIP?", ">SENT?", "DEVICE?", rule=False
    )
    for stage in ring["stages"]:
        route, trip, sent = _worst_lane(stage.get("links") or [])
        table.add_row(
            f"  {quantities.count(stage.get('stage'))}",
            literal(stage.get("peer") or stage.get("node")),
            quantities.layers(stage.get("layers")),
            stage_phase(stage),
            quantities.count(stage.get("sessions")),
            _percent(stage.get("kv_tokens"), ring.get("kv_tokens")),
            route,
            trip,
            sent,
            literal(stage.get("device")),
        )
    return table


def _worst_lane(links: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    """Of the lanes that leave a stage: the way, the longest round trip, and all bytes."""
    if not links:
        return "-", "-", "-"
    order = {"": 3, "polled": 2, "relayed": 1}
    worst = max(links, key=lambda link: order.get(str(link.get("route")), 0))
    trips = [link["round_trip_ms"] for link in links if link.get("round_trip_ms") is not None]
    sent = sum(link.get("bytes") or 0 for link in links)
    return str(worst.get("route") or "down"), f"{max(trips):.1f} ms" if trips else "-", quantities.size(sent)


def _requests(requests: Sequence[Mapping[str, Any]], marked: int | None) -> FittedTable:
    table = FittedTable("REQUEST", "PHASE", ">TOKENS", ">TOKENS/S", ">AGE", ">PROMPT?", "MODEL?", rule=False)
    for index, one in enumerate(requests):
        table.add_row(
            _mark(literal(str(one.get("request", "-"))[:8]), index == marked),
            literal(one.get("phase")),
            quantities.count(one.get("tokens")),
            f"{one.get('tokens_per_s') or 0:.1f}",
            _age(one.get("age_s")),
            quantities.count(one.get("prompt_tokens")),
            literal(one.get("model")),
        )
    if not requests:
        table.add_row("none is running", *[""] * 6)
    return table


def _events(events: Sequence[Mapping[str, Any]], now_unix_s: float, marked: int | None) -> RenderableType:
    lines = [Text("EVENT", style="bold")]
    for index, event in enumerate(events):
        values = {key: value for key, value in event.items() if key not in ("event", "time")}
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{_age(max(0.0, now_unix_s - (event.get('time') or now_unix_s)))} ago".rjust(9), style="dim")
        line.append("  ").append_text(_mark(literal(_told(str(event.get("event")), values)), index == marked))
        lines.append(line)
    if not events:
        lines.append(Text("nothing has happened yet"))
    return Group(*lines)


def _told(event: str, values: Mapping[str, object]) -> str:
    """An older or newer coordinator's event may lack what its sentence speaks of."""
    try:
        return sentence(event, values)
    except (KeyError, ValueError, TypeError):
        return event


def _node_details(node: Mapping[str, Any]) -> RenderableType:
    lines = [Text.assemble(literal(node.get("name")), " ", node_state(node), style="bold")]
    for key in ("node", "roles", "address", "route", "silence_s", "memory_bytes", "device", "threads", "models"):
        value = node.get(key)
        if value not in (None, [], ()):
            shown = quantities.size(value) if key == "memory_bytes" and isinstance(value, int) else value
            text = ", ".join(map(str, shown)) if isinstance(shown, list) else str(shown)
            lines.append(Text.assemble(f"{key.removesuffix('_bytes').removesuffix('_s'):>9}  ", literal(text)))
    table = FittedTable("STAGE OF", ">STAGE", "PHASE", ">PID", "GAUGES?")
    for stage in node.get("stages") or []:
        gauges = ", ".join(f"{key} {value}" for key, value in (stage.get("gauges") or {}).items())
        pid = str(stage["pid"]) if stage.get("pid") is not None else "-"
        table.add_row(
            literal(stage.get("model")),
            quantities.count(stage.get("stage")),
            literal(stage.get("phase")),
            pid,
            literal(gauges),
        )
    return Group(*lines, Text(), table)


def _mark(text: Text, marked: bool) -> Text:
    if marked:
        text.stylize(_SELECTED)
    return text


def _percent(part: float | None, whole: float | None) -> str:
    return f"{100 * (part or 0) / whole:.0f}%" if whole else "-"


def _age(seconds: float | None) -> str:
    """`12 s`, `3 min`, `5 h`."""
    if seconds is None:
        return "-"
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _lines(console: Console, options: ConsoleOptions, what: RenderableType) -> list[list[Segment]]:
    lines = console.render_lines(what, options, pad=False)
    return [Segment.adjust_line_length(line, options.max_width, pad=False) for line in lines]
