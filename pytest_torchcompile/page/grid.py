"""Grid: the cells of a report as one table. Each row and column is a value of an axis, and within it of the others.

``page.js`` builds the same table for other axes and for some of the cells; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

__all__ = ["WIDTH", "Band", "Grid", "arrange", "split"]

WIDTH: Final = 32
"""About how many squares a row may have before an axis goes to the lines instead of across."""
JOINT: Final = " · "

C = TypeVar("C")


@dataclass(frozen=True)
class Band:
    """The rows, or the columns, of one value of an axis."""

    value: str
    parts: tuple[tuple[str, ...], ...]
    """Values of the other axes, one tuple for each row (column); at least one, which may be empty."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Each part in words."""
        return tuple(JOINT.join(part) for part in self.parts)


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


def split(rest: Sequence[str], values: Mapping[str, Sequence[str]], columns: int) -> tuple[list[str], list[str]]:
    """Split the other axes into lines and across, the least telling of them across as long as there is room."""
    across: list[str] = []
    width = max(1, columns)
    for axis in reversed(rest):
        width *= max(1, len(values[axis]))
        if width > WIDTH:
            break
        across.insert(0, axis)
    return [axis for axis in rest if axis not in across], across


def arrange(cells: Sequence[tuple[Mapping[str, str], C]], rows: str, columns: str, rest: Sequence[str],
            values: Mapping[str, Sequence[str]]) -> Grid[C]:
    """Arrange cells, each with its axes.

    :param values: the values of each axis in their order; a cell without an axis has the value ``""`` of it.
    """
    lines, across = split(rest, values, len(values.get(columns, ())))
    ranks = {axis: {value: rank for rank, value in enumerate(found)} for axis, found in values.items()}
    places: dict[tuple[tuple[str, ...], tuple[str, ...]], list[C]] = {}
    for axes, cell in cells:
        row, column = ([axes.get(axis, "") for axis in (first, *others)]
                       for first, others in ((rows, lines), (columns, across)))
        places.setdefault((tuple(row), tuple(column)), []).append(cell)

    def bands(keys: set[tuple[str, ...]], axes: Sequence[str]) -> tuple[Band, ...]:
        ordered = sorted(keys, key=lambda key: [ranks.get(a, {}).get(v, 0) for a, v in zip(axes, key, strict=True)])
        found: dict[str, list[tuple[str, ...]]] = {}
        for first, *others in ordered:
            found.setdefault(first, []).append(tuple(others))
        return tuple(Band(value, tuple(parts)) for value, parts in found.items())

    return Grid(tuple(lines), tuple(across), bands({row for row, _ in places}, [rows, *lines]),
                bands({column for _, column in places}, [columns, *across]), places)
