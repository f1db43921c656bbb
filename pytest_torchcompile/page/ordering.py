"""Which axes a heat map shows first: those whose values tell best which cells fail, so that failures cluster.

The measure is omega squared of a one-way analysis of variance (Hays, Statistics for Psychologists, 1963): the share of
the variance of "fails" (0 or 1) that the groups explain, less what as many groups would explain by chance

    omega^2 = (SS_between - df_between * MS_within) / (SS_total + MS_within).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

__all__ = ["Order", "influence", "order"]

MOST_PAIRS: Final = 12
"""Only so many axes are tried in pairs, those that explain most alone: a report may have hundreds."""


@dataclass(frozen=True)
class Order:
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
        return tuple(axis for axis in (self.rows, self.columns) if axis) + self.rest


def order(cells: Sequence[tuple[Mapping[str, str], bool | None]]) -> Order:
    """Order the axes of some cells.

    :param cells: for each its axes and whether it fails; None where it did not run, which tells nothing.
    """
    values: dict[str, dict[str, None]] = {}
    for axes, _ in cells:
        for axis in axes:
            values.setdefault(axis, {})
    for axes, _ in cells:
        for axis, found in values.items():
            found[axes.get(axis, "")] = None
    varying = [axis for axis, found in values.items() if len(found) > 1] or list(values)[:1]
    ran = [(axes, float(fails)) for axes, fails in cells if fails is not None]
    alone = {axis: _explained(ran, (axis,)) for axis in varying}
    ranked = sorted(varying, key=lambda axis: -alone[axis])  # stable: equals stay in the order of the matrix
    pairs = list(combinations(ranked[:MOST_PAIRS], 2))
    if not pairs:
        return Order(ranked[0] if ranked else "", "", (), alone[ranked[0]] if ranked else 0.0)
    together = {pair: _explained(ran, pair) for pair in pairs}
    best = max(pairs, key=lambda pair: together[pair])  # the first of equals
    rows, columns = sorted(best, key=lambda axis: (-len(values[axis]), varying.index(axis)))
    return Order(rows, columns, tuple(axis for axis in ranked if axis not in best), together[best])


def _explained(cells: Sequence[tuple[Mapping[str, str], float]], axes: tuple[str, ...]) -> float:
    return influence((tuple(found.get(axis, "") for axis in axes), fails) for found, fails in cells)


def influence(cells: Iterable[tuple[object, float]]) -> float:
    """Omega squared of groups: for each cell its group and 1 if it fails, else 0. Between 0 and 1.

    >>> influence([("a", 0), ("a", 0), ("b", 1), ("b", 1)])
    1.0
    """
    groups: dict[object, tuple[int, float]] = {}
    for group, fails in cells:
        count, total = groups.get(group, (0, 0.0))
        groups[group] = count + 1, total + fails
    count = sum(n for n, _ in groups.values())
    failing = sum(total for _, total in groups.values())
    spread = failing - failing**2 / count if count else 0.0  # of zeros and ones the squares sum up to the ones
    between = sum(total**2 / n for n, total in groups.values()) - failing**2 / count if count else 0.0
    free = count - len(groups)
    if spread <= 0 or len(groups) < 2:
        return 0.0
    within = (spread - between) / free if free else spread / (count - 1)  # one cell a group: as if by chance
    return max(0.0, (between - (len(groups) - 1) * within) / (spread + within))
