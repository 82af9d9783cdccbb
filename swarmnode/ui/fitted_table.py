"""A table that leaves its least important columns out where the terminal is too narrow for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.measure import Measurement
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

UNBOUNDED = 10_000


class FittedTable:
    """Columns by title: a leading `>` aligns right, a trailing `?` may be left out (the last such column first)."""

    def __init__(self, *columns: str, rule: bool = True) -> None:
        """`rule`: a line under the titles."""
        self._columns = columns
        self._box = box.SIMPLE_HEAD if rule else None
        self._rows: list[tuple[RenderableType, ...]] = []

    def add_row(self, *cells: RenderableType) -> None:
        if len(cells) != len(self._columns):
            raise ValueError(f"{len(cells)} cells for {len(self._columns)} columns")
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        droppable = [index for index, title in enumerate(self._columns) if title.endswith("?")]
        shown = list(range(len(self._columns)))
        table = self._table(shown)
        unbounded = options.update(max_width=UNBOUNDED)  # else a table says it fits whatever there is
        while droppable and Measurement.get(console, unbounded, table).maximum > options.max_width:
            shown.remove(droppable.pop())
            table = self._table(shown)
        yield table

    def _table(self, shown: list[int]) -> Table:
        table = Table(box=self._box, show_edge=False, pad_edge=False, header_style="bold")
        for index in shown:
            title = self._columns[index].rstrip("?")
            right = title.startswith(">")
            table.add_column(title.removeprefix(">"), justify="right" if right else "left", no_wrap=True)
        for row in self._rows:
            table.add_row(*(row[index] for index in shown))
        return table
