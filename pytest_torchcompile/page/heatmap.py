"""Heat map: the cells of a run arranged as a table of letters and colours.

Its grid is one table. Each row and column is a value of an axis, and within it of the others. The first axes are those
whose values tell best which cells fail, so that failures cluster. The measure is omega squared of a one-way analysis of
variance (Hays, Statistics for Psychologists, 1963): the share of the variance of "fails" (0 or 1) that the groups
explain, less what as many groups would explain by chance

    omega^2 = (SS_between - df_between * MS_within) / (SS_total + MS_within).

``page.js`` builds the same table for other axes and for some of the cells; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, Final, Generic, TypeAlias, TypeVar

from pytest_torchcompile.gate.judged import BAD
from pytest_torchcompile.page.markup import VERDICT_STYLES, Html, link, tag
from pytest_torchcompile.report.facts import Facts

__all__ = [
    "DENSE",
    "FAILING",
    "WIDTH",
    "AxisOrder",
    "Band",
    "Grid",
    "HeatMap",
    "arrange",
    "cell_in_words",
    "influence",
    "map_table",
    "order_axes",
    "split_axes",
    "square_class",
]

WIDTH: Final = 32
"""About how many squares a row may have before an axis goes to the lines instead of across."""
JOINT: Final = " · "
MOST_PAIRS: Final = 12
"""Only so many axes are tried in pairs, those that explain most alone: a report may have hundreds."""

C = TypeVar("C")
Axes: TypeAlias = "Mapping[str, str]"


# which axes come first


@dataclass(frozen=True)
class AxisOrder:
    """The axes of a report that vary, the telling ones first."""

    rows: str
    columns: str
    """Empty where only one axis varies."""
    rest: tuple[str, ...]
    explained: float
    """Omega squared of rows and columns together; 0 where nothing fails or everything does."""

    @property
    def axes(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(filter(None, (self.rows, self.columns))) + self.rest


def order_axes(cells: Sequence[tuple[Axes, bool | None]]) -> AxisOrder:
    """Order the axes of some cells.

    :param cells: for each its axes and whether it fails; None where it did not run, which tells nothing.
    """
    values = _values_by_axis([axes for axes, _ in cells])
    # Where no axis varies the first one is shown, so that there is a table at all.
    varying = [axis for axis, there in values.items() if len(there) > 1] or list(values)[:1]
    if not varying:
        return AxisOrder("", "", (), 0.0)
    ran = [(axes, float(fails)) for axes, fails in cells if fails is not None]
    alone = {axis: _explained_by(ran, (axis,)) for axis in varying}
    # Stable: equals stay in the order of the matrix.
    ranked = sorted(varying, key=lambda axis: -alone[axis])
    if len(ranked) == 1:
        return AxisOrder(ranked[0], "", (), alone[ranked[0]])
    # Only among the axes that tell most by themselves: all pairs of many axes would take long on a large matrix.
    together = {pair: _explained_by(ran, pair) for pair in combinations(ranked[:MOST_PAIRS], 2)}
    # `max` takes the first of equals.
    best = max(together, key=lambda pair: together[pair])
    rows, columns = sorted(best, key=lambda axis: (-len(values[axis]), varying.index(axis)))
    return AxisOrder(rows, columns, tuple(axis for axis in ranked if axis not in best), together[best])


def _values_by_axis(cells: Sequence[Axes]) -> dict[str, set[str]]:
    """A cell without an axis has the value ``""`` of it."""
    values: dict[str, set[str]] = {}
    for axes in cells:
        values.update((axis, set()) for axis in axes if axis not in values)
    for axis, found in values.items():
        found.update(axes.get(axis, "") for axes in cells)
    return values


def _explained_by(cells: Sequence[tuple[Axes, float]], axes: tuple[str, ...]) -> float:
    return influence((_values_of(cell, axes), fails) for cell, fails in cells)


def influence(cells: Iterable[tuple[object, float]]) -> float:
    """Omega squared of groups: for each cell its group and 1 if it fails, else 0. Between 0 and 1.

    >>> influence([("a", 0), ("a", 0), ("b", 1), ("b", 1)])
    1.0
    """
    groups: dict[object, tuple[int, float]] = {}
    for group, fails in cells:
        size, failing = groups.get(group, (0, 0.0))
        groups[group] = size + 1, failing + fails
    if len(groups) < 2:
        return 0.0
    count = sum(size for size, _ in groups.values())
    all_failing = sum(failing for _, failing in groups.values())
    # Of zeros and ones the squares sum up to the ones.
    spread = all_failing - all_failing**2 / count
    if spread <= 0:
        return 0.0
    between = sum(failing**2 / size for size, failing in groups.values()) - all_failing**2 / count
    free = count - len(groups)
    # One cell a group tells nothing of the spread within: as if the groups were by chance.
    within = (spread - between) / free if free else spread / (count - 1)
    # Omega, not eta squared: what that many groups would explain by chance is taken off, so ids do not win.
    return max(0.0, (between - (len(groups) - 1) * within) / (spread + within))


# the table


@dataclass(frozen=True)
class Band:
    """The rows, or the columns, of one value of an axis."""

    value: str
    parts: tuple[tuple[str, ...], ...]
    """Values of the other axes, one tuple for each row (column); at least one, which may be empty."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Each part in words."""
        return tuple(map(JOINT.join, self.parts))


@dataclass(frozen=True)
class Grid(Generic[C]):
    """A table: bands of rows, bands of columns, and the cells where they meet."""

    lines: tuple[str, ...]
    """The axes whose values are rows within a row."""
    across: tuple[str, ...]
    """The axes whose values are columns within a column."""
    rows: tuple[Band, ...]
    columns: tuple[Band, ...]
    places: dict[tuple[tuple[str, ...], tuple[str, ...]], list[C]]
    """(row value and its part, column value and its part) to the cells there: one, unless a report repeats itself."""


def split_axes(rest: Sequence[str], values: Mapping[str, Sequence[str]], columns: int) -> tuple[list[str], list[str]]:
    """Split the other axes into lines and across, the least telling of them across as long as there is room."""
    across: list[str] = []
    width = max(1, columns)
    # From the end, where the axes stand that tell least: those may be spread across, the others stay one below the
    # other.
    for axis in reversed(rest):
        width *= max(1, len(values[axis]))
        if width > WIDTH:
            break
        across.insert(0, axis)
    return [axis for axis in rest if axis not in across], across


def arrange(cells: Sequence[tuple[Axes, C]], rows: str, columns: str, rest: Sequence[str],
            values: Mapping[str, Sequence[str]]) -> Grid[C]:
    """Arrange cells, each with its axes.

    :param values: the values of each axis in their order; a cell without an axis has the value ``""`` of it.
    """
    lines, across = split_axes(rest, values, len(values.get(columns, ())))
    places: dict[tuple[tuple[str, ...], tuple[str, ...]], list[C]] = {}
    for axes, cell in cells:
        row, column = _values_of(axes, [rows, *lines]), _values_of(axes, [columns, *across])
        places.setdefault((row, column), []).append(cell)
    row_keys, column_keys = {row for row, _ in places}, {column for _, column in places}
    return Grid(tuple(lines), tuple(across), _bands_of(row_keys, [rows, *lines], values),
                _bands_of(column_keys, [columns, *across], values), places)


def _values_of(cell: Axes, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell.get(axis, "") for axis in axes)


def _bands_of(keys: Iterable[tuple[str, ...]], axes: Sequence[str],
              values: Mapping[str, Sequence[str]]) -> tuple[Band, ...]:
    """Keys by their first value, all in the order of the axes' values."""
    ranks = []
    for axis in axes:
        ranks.append({value: rank for rank, value in enumerate(values.get(axis, ()))})

    def position(key: tuple[str, ...]) -> list[int]:
        return [rank.get(value, 0) for rank, value in zip(ranks, key, strict=True)]

    parts: dict[str, list[tuple[str, ...]]] = {}
    for first, *others in sorted(keys, key=position):
        parts.setdefault(first, []).append(tuple(others))
    return tuple(Band(value, tuple(own)) for value, own in parts.items())


# -------------------------------------------------------------------------------------------------- letters and colours
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
        """The values of each axis: those in which most cells fail come first, equals as in the report."""
        axes: dict[str, None] = {}
        for cell in self.cells:
            axes.update(dict.fromkeys(cell.axes))
        return {axis: self._values_of_axis(axis) for axis in axes}

    def _values_of_axis(self, axis: str) -> list[str]:
        failing: dict[str, int] = {}
        for cell in self.cells:
            value = cell.axes.get(axis, "")
            failing[value] = failing.get(value, 0) + (cell.status in FAILING)
        # Sorting is stable.
        return sorted(failing, key=lambda value: -failing[value])

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
    # A head without a word would be read as one by those who listen.
    if not label:
        return tag("td", **{**attributes, "scope": None})
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
    if facts.reused:
        words += ", reused"
    return f"{words}, {mark}" if mark else words


def square_class(facts: Facts, mark: str = "") -> str:
    """Of a square, besides what its colour is by: its mark against a baseline, and whether its result is reused."""
    return f"{mark} {'reused' if facts.reused else ''}".strip()


def _square(facts: Facts, index: int, marks: Mapping[str, str]) -> Html:
    """One cell of the map: a letter, a colour, and in words what it stands for."""
    # A status of another version has no style; it is shown with a question mark rather than left out.
    mark, style = marks.get(facts.id, ""), VERDICT_STYLES.get(facts.status)
    words = cell_in_words(facts, mark)
    classes = f"s {facts.status} {square_class(facts, mark)}".rstrip()
    return tag("a", style.letter if style else "?", href=link(facts.id), class_=classes,
               aria_label=words, title=words, data_i=index)
