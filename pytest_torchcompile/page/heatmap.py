"""Heat map: the cells of a run arranged as a table of letters and colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from pytest_torchcompile.gate.judged import BAD
from pytest_torchcompile.page.grid import Band, Grid, arrange
from pytest_torchcompile.page.markup import Html, tag
from pytest_torchcompile.page.ordering import Order, order
from pytest_torchcompile.page.pieces import link
from pytest_torchcompile.page.theme import VERDICT_STYLES
from pytest_torchcompile.report.facts import Facts

__all__ = ["DENSE", "FAILING", "HeatMap", "caption", "square", "table", "told"]

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
        axes = dict.fromkeys(axis for cell in self.cells for axis in cell.axes)
        return {axis: list(dict.fromkeys(cell.axes.get(axis, "") for cell in self.cells)) for axis in axes}

    @cached_property
    def order(self) -> Order:
        """The axes that vary; those that tell best which cells fail come first."""
        return order([(cell.axes, None if cell.status in ("skip", "not_run") else cell.status in FAILING)
                      for cell in self.cells])

    @cached_property
    def grid(self) -> Grid[int]:
        """The table, of indices into :attr:`cells`."""
        by = self.order
        return arrange([(cell.axes, i) for i, cell in enumerate(self.cells)], by.rows, by.columns, by.rest, self.values)


def caption(by: Order, grid: Grid[int]) -> str:
    """What the rows and columns are, in words."""
    def side(name: str, axis: str, within: Sequence[str]) -> str:
        return f"{name}: {axis}" + (f", within it {', '.join(within)}" if within else "") if axis else ""

    return ". ".join(filter(None, (side("Rows", by.rows, grid.lines), side("Columns", by.columns, grid.across))))


def table(heat: HeatMap, marks: Mapping[str, str]) -> Html:
    """The map as a table, each cell a link to its article. ``marks``: cell to what changed against a baseline."""
    grid = heat.grid
    corner = tag("td", colspan=2)
    bands = [_head(band.value, colspan=len(band.parts), scope="colgroup") for band in grid.columns]
    heads = [tag("tr", corner, *bands)]
    if grid.across:
        labels = [_head(label, scope="col", class_=_first(i))
                  for band in grid.columns for i, label in enumerate(band.labels)]
        heads.append(tag("tr", corner, *labels, class_="sub"))
    bodies = [tag("tbody", *(_row(heat, band, i, marks) for i in range(len(band.parts)))) for band in grid.rows]
    return tag("table", tag("caption", caption(heat.order, grid)), tag("thead", *heads), *bodies,
               class_="map dense" if len(heat.cells) > DENSE else "map", id="map")  # fmt: skip


def _head(label: str, **attributes: Any) -> Html:
    return tag("th", tag("span", label), title=label, **attributes)


def _first(index: int) -> str | None:
    return "g" if index == 0 else None


def _row(heat: HeatMap, band: Band, number: int, marks: Mapping[str, str]) -> Html:
    part, grid = band.parts[number], heat.grid
    heads = [_head(band.value, scope="rowgroup", rowspan=len(band.parts))] if number == 0 else []
    heads.append(_head(band.labels[number], scope="row", class_="line"))
    spots = []
    for column in grid.columns:
        for i, other in enumerate(column.parts):
            here = grid.places.get(((band.value, *part), (column.value, *other)), ())
            spots.append(tag("td", *(square(heat.cells[cell], cell, marks) for cell in here), class_=_first(i)))
    return tag("tr", *heads, *spots)


def told(facts: Facts, mark: str = "") -> str:
    """A cell in one line: its id, its status, the checks that failed, and its mark against a baseline."""
    failed = ", ".join(v.check for v in facts.failed)
    return "".join((facts.id, ": ", facts.status, f" ({failed})" if failed else "", f", {mark}" if mark else ""))


def square(facts: Facts, index: int, marks: Mapping[str, str]) -> Html:
    """One cell of the map: a letter, a colour, and in words what it stands for."""
    mark, style = marks.get(facts.id, ""), VERDICT_STYLES.get(facts.status)
    words = told(facts, mark)
    return tag("a", style.letter if style else "?", href=link(facts.id), class_=f"s {facts.status} {mark}".rstrip(),
               aria_label=words, title=words, data_i=index)
