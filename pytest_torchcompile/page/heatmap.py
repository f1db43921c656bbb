"""Heat map: the cells of a run arranged as a table of letters and colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from pytest_torchcompile.gate.judged import BAD
from pytest_torchcompile.page.grid import AxisOrder, Band, Grid, arrange, order_axes
from pytest_torchcompile.page.markup import Html, link, tag
from pytest_torchcompile.page.theme import VERDICT_STYLES
from pytest_torchcompile.report.facts import Facts

__all__ = ["DENSE", "FAILING", "HeatMap", "cell_in_words", "map_table"]

FAILING: Final = frozenset((*BAD, "not_run"))
"""What is not good in a map: verdicts that a release cannot have, and those that never came."""
DENSE: Final = 400
"""From how many cells on the squares are smaller."""


@dataclass(frozen=True)
class HeatMap:
    """Cells, and in which order their axes are shown."""

    cells: Sequence[Facts]

    @cached_property
    def values(self) -> dict[str, list[str]]:
        """The values of each axis, as they first come in the report."""
        axes: dict[str, None] = {}
        for cell in self.cells:
            axes.update(dict.fromkeys(cell.axes))
        return {axis: list(dict.fromkeys(cell.axes.get(axis, "") for cell in self.cells)) for axis in axes}

    @cached_property
    def order(self) -> AxisOrder:
        """The axes that vary; those that tell best which cells fail come first."""
        return order_axes([(cell.axes, _fails(cell)) for cell in self.cells])

    @cached_property
    def grid(self) -> Grid[int]:
        """The table, of indices into :attr:`cells`."""
        # Indices, since page.js knows cells by them.
        cells = [(cell.axes, index) for index, cell in enumerate(self.cells)]
        return arrange(cells, self.order.rows, self.order.columns, self.order.rest, self.values)


def _fails(cell: Facts) -> bool | None:
    """None where it did not run."""
    return None if cell.status in ("skip", "not_run") else cell.status in FAILING


def map_table(heat: HeatMap, marks: Mapping[str, str]) -> Html:
    """The map as a table, each cell a link to its article. ``marks``: cell to what changed against a baseline."""
    grid = heat.grid
    # Each row has two heads: its band and its own label.
    corner = tag("td", colspan=2)
    bands = [_head_cell(band.value, colspan=len(band.parts), scope="colgroup") for band in grid.columns]
    heads = [tag("tr", corner, bands)]
    if grid.across:
        labels = []
        for band in grid.columns:
            for index, label in enumerate(band.labels):
                labels.append(_head_cell(label, scope="col", class_=_class_of_first(index)))
        heads.append(tag("tr", corner, labels, class_="sub"))
    bodies = []
    for band in grid.rows:
        bodies.append(tag("tbody", [_row(heat, band, number, marks) for number in range(len(band.parts))]))
    return tag("table", tag("caption", _caption(heat.order, grid)), tag("thead", heads), bodies,
               class_="map dense" if len(heat.cells) > DENSE else "map", id="map")  # fmt: skip


def _caption(order: AxisOrder, grid: Grid[int]) -> str:
    """What the rows and columns are, in words."""
    sides = [_side_in_words("Rows", order.rows, grid.lines), _side_in_words("Columns", order.columns, grid.across)]
    return ". ".join(filter(None, sides))


def _side_in_words(name: str, axis: str, within: Sequence[str]) -> str:
    if not axis:
        return ""
    return f"{name}: {axis}, within it {', '.join(within)}" if within else f"{name}: {axis}"


def _head_cell(label: str, **attributes: Any) -> Html:
    return tag("th", tag("span", label), title=label, **attributes)


def _class_of_first(index: int) -> str | None:
    """The first column of a band has a gap before it."""
    return "g" if index == 0 else None


def _row(heat: HeatMap, band: Band, number: int, marks: Mapping[str, str]) -> Html:
    row = (band.value, *band.parts[number])
    heads = []
    # The head of a band stands once, beside all of its rows.
    if number == 0:
        heads.append(_head_cell(band.value, scope="rowgroup", rowspan=len(band.parts)))
    heads.append(_head_cell(band.labels[number], scope="row", class_="line"))
    spots = []
    for column in heat.grid.columns:
        for index, part in enumerate(column.parts):
            here = heat.grid.places.get((row, (column.value, *part)), ())
            squares = [_square(heat.cells[cell], cell, marks) for cell in here]
            # A place without a cell is an empty field, so that columns stay in line.
            spots.append(tag("td", squares, class_=_class_of_first(index)))
    return tag("tr", heads, spots)


def cell_in_words(facts: Facts, mark: str = "") -> str:
    """A cell in one line: its id, its status, the checks that failed, and its mark against a baseline."""
    words = f"{facts.id}: {facts.status}"
    if facts.failed:
        words += f" ({', '.join(verdict.check for verdict in facts.failed)})"
    return f"{words}, {mark}" if mark else words


def _square(facts: Facts, index: int, marks: Mapping[str, str]) -> Html:
    """One cell of the map: a letter, a colour, and in words what it stands for."""
    mark, style = marks.get(facts.id, ""), VERDICT_STYLES.get(facts.status)
    words = cell_in_words(facts, mark)
    return tag("a", style.letter if style else "?", href=link(facts.id), class_=f"s {facts.status} {mark}".rstrip(),
               aria_label=words, title=words, data_i=index)
