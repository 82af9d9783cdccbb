"""A load as it goes, stage by stage: a pure view of `GET /api/v1/models/{id}/status`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swarmnode.ui import quantities

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

BAR_COLUMNS = 28


def load_view(status: Mapping[str, Any]) -> RenderableType:
    """One line a stage with a bar, for `rich.live.Live`; of a load without stages yet, one line that says so."""
    stages = status.get("stages") or []
    if not stages:
        return Text(f"{status.get('id', '-')}: {status.get('state', 'starting')}")
    grid = Table.grid(padding=(0, 2))
    for stage in stages:
        done, total = _amount(stage)
        bar = ProgressBar(total=max(total, 1), completed=min(done, max(total, 1)), width=BAR_COLUMNS)
        grid.add_row(*(Text(cell) for cell in _cells(stage)), bar, Text(_amount_text(stage)))
    return grid


def load_lines(status: Mapping[str, Any]) -> list[str]:
    """The same as plain lines, for outputs that are no terminal: print only those that changed."""
    stages = status.get("stages") or []
    if not stages:
        return [f"{status.get('id', '-')}: {status.get('state', 'starting')}"]
    return ["  ".join([*_cells(stage), _amount_text(stage)]).rstrip() for stage in stages]


def _cells(stage: Mapping[str, Any]) -> list[str]:
    return [
        f"stage {stage.get('stage', '-')}",
        str(stage.get("peer") or stage.get("node") or "-"),
        f"layers {quantities.layers(stage.get('layers'))}",
        str(stage.get("phase") or "starting"),
    ]


def _amount(stage: Mapping[str, Any]) -> tuple[float, float]:
    if stage.get("phase") == "ready":
        return 1.0, 1.0
    return float(stage.get("done") or 0), float(stage.get("total") or 0)


def _amount_text(stage: Mapping[str, Any]) -> str:
    """`43% of 1.2 GiB` while files are fetched, `43%` while layers load; nothing once it is ready."""
    done, total = _amount(stage)
    if stage.get("phase") == "ready" or not total:
        return ""
    percent = f"{100 * min(done, total) / total:.0f}%"
    return f"{percent} of {quantities.size(total)}" if stage.get("phase") == "fetching" else percent
