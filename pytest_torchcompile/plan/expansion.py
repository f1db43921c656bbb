"""Expansion: axes and rules to planned cells. A pure function of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Final

from pytest_torchcompile.cell import AXES, Cell, Scalar
from pytest_torchcompile.checks import default_limits
from pytest_torchcompile.plan.axes import Axes, value_key, value_keys
from pytest_torchcompile.plan.rules import OUTCOMES, Rule
from pytest_torchcompile.wrappers import limits_of

__all__ = ["MAX_CELLS", "Excluded", "Expansion", "PlannedCell", "count_combinations", "expand"]

MAX_CELLS: Final = 250_000
"""Beyond this a matrix is a mistake: a second each would take three days."""


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """A cell, and what the matrix says of it."""

    cell: Cell
    outcome: str = "run"
    """``run``, ``skip`` or ``xfail``."""
    reason: str = ""
    issue: str = ""
    until: str = ""
    """The last day on which an xfail holds, YYYY-MM-DD."""
    checks: tuple[str, ...] = ()
    """The checks that an xfail expects to fail; empty: the cell as a whole."""
    limits: dict[str, float] = field(default_factory=dict)
    rule: str = ""
    """``file:line`` of the rule behind the outcome; empty for ``run``."""
    also: tuple[str, ...] = ()
    """The checks that rules ask of this cell, besides those of the matrix."""
    expired: Rule | None = None
    """The xfail that would hold for the cell if its day were not over."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """A combination of values that makes no sense, and why."""

    cell: Cell
    reason: str
    issue: str = ""
    rule: str = ""


@dataclass
class Expansion:
    """What became of every combination of values."""

    planned: list[PlannedCell]
    rows: list[tuple[int, ...]]
    """For each planned cell, its values as numbers of the values of each axis."""
    excluded: list[Excluded]
    hits: list[int]
    """For each rule, how many cells it decided (``limits``, ``also``: how many that are left it holds for)."""
    matches: list[int]
    """For each rule, how many cells it matches, whatever another rule decided before."""


def count_combinations(axes_of: Mapping[str, Axes]) -> int:
    """Return the number of combinations of the axes' values, over all models."""
    return sum(prod(map(len, axes.values())) for axes in axes_of.values())


def expand(axes: Axes, axes_of: Mapping[str, Axes], rules: Sequence[Rule], ignored: frozenset[int] = frozenset(),
           limits: dict[str, float] | None = None, elsewhere: frozenset[int] = frozenset()) -> Expansion:
    """Multiply the axes of each model and ask the rules. ``axes`` has every value that a model of ``axes_of`` takes.

    The first ``exclude``, ``skip`` or ``xfail`` that matches decides, ``ignored`` ones (by index) left aside.
    Every ``limits`` that matches adds to ``limits`` (the defaults, under those of the cell's wrapper), later ones over
    earlier ones; every ``also`` its checks, and their default limits where no other rule sets them. Rules ``elsewhere``
    (by index) are for other versions of torch: that they match is counted, and nothing comes of it.
    """
    asked = _AskedRules(rules, axes, ignored, elsewhere)
    expansion = Expansion([], [], [], asked.hits, asked.matches)
    for row, cell in _numbered_cells(axes, axes_of):
        outcome, expired = asked.deciding_rule(row)
        if outcome is not None and outcome.verb == "exclude":
            expansion.excluded.append(Excluded(cell, outcome.reason, outcome.issue, outcome.where))
            continue
        cell_limits, also = asked.added_to(cell, row, _default_limits_of(cell, limits or {}))
        planned = _planned_cell(cell, outcome, cell_limits, also)
        if outcome is None and expired is not None:
            planned = replace(planned, expired=expired)
        expansion.planned.append(planned)
        expansion.rows.append(row)
    return expansion


class _AskedRules:
    """The rules of a matrix, asked about one cell after another; they count how often they were asked for."""

    def __init__(self, rules: Sequence[Rule], axes: Axes, ignored: frozenset[int], elsewhere: frozenset[int]) -> None:
        self._rules, self._ignored, self._elsewhere = rules, ignored, elsewhere
        # Once for each rule, not for each cell: a large matrix has thousands of cells.
        self._conditions = [_Condition.of_rule(rule, axes) for rule in rules]
        self._deciding = [index for index, rule in enumerate(rules) if rule.verb in OUTCOMES]
        self._adding = [index for index, rule in enumerate(rules) if rule.verb not in OUTCOMES]
        self.hits, self.matches = [0] * len(rules), [0] * len(rules)

    def deciding_rule(self, row: tuple[int, ...]) -> tuple[Rule | None, Rule | None]:
        """The rule that decides about a cell, and the first that would have, had it not been ignored."""
        outcome: Rule | None = None
        expired: Rule | None = None
        for index in self._matching(self._deciding, row):
            # The first rule has decided; what comes after it only counts its matches.
            if outcome is not None:
                continue
            self.hits[index] += 1
            if index in self._elsewhere:
                continue
            if index in self._ignored:
                expired = expired or self._rules[index]
            else:
                outcome = self._rules[index]
        return outcome, expired

    def added_to(self, cell: Cell, row: tuple[int, ...],
                 cell_limits: dict[str, float]) -> tuple[dict[str, float], tuple[str, ...]]:
        """The cell's limits as the rules change them, and the checks that it has besides."""
        also: list[str] = []
        for index in self._matching(self._adding, row):
            self.hits[index] += 1
            if index in self._elsewhere:
                continue
            rule = self._rules[index]
            if rule.verb == "also":
                also += [name for name in rule.checks if name not in also]
                # What another rule has set holds, wherever it stands in the file.
                cell_limits = default_limits(rule.checks, cell.wrapper) | cell_limits
            else:
                cell_limits = cell_limits | rule.limits
        return cell_limits, tuple(also)

    def _matching(self, indices: Sequence[int], row: tuple[int, ...]) -> Iterator[int]:
        for index in indices:
            if self._conditions[index].holds_for(row):
                self.matches[index] += 1
                yield index


def _default_limits_of(cell: Cell, limits: Mapping[str, float]) -> dict[str, float]:
    """The default limits, and over them those of the cell's wrapper: it sets no limit that no check asks for."""
    cell_limits = dict(limits)
    for name, value in limits_of(cell.wrapper).items():
        # A limit belongs to a check; that of a check nobody asked for would stand in the report for nothing.
        if name in cell_limits:
            cell_limits[name] = value
    return cell_limits


def _planned_cell(cell: Cell, rule: Rule | None, limits: dict[str, float], also: tuple[str, ...]) -> PlannedCell:
    if rule is None:
        return PlannedCell(cell, limits=limits, also=also)
    until = ""
    if rule.until is not None:
        until = rule.until.isoformat()
    return PlannedCell(cell, rule.verb, rule.reason, rule.issue, until, rule.checks, limits, rule.where, also)


@dataclass(frozen=True, slots=True)
class _AllowedNumbers:
    """The values that a condition allows on one axis, as their numbers among the values of the axis."""

    column: int
    allowed: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Condition:
    """A rule's condition. Rows are compared as numbers, which is faster than comparing values."""

    select: list[_AllowedNumbers]
    unless: list[_AllowedNumbers]

    @classmethod
    def of_rule(cls, rule: Rule, axes: Axes) -> _Condition:
        return cls(_allowed_numbers(rule.select, axes), _allowed_numbers(rule.unless, axes))

    def holds_for(self, row: tuple[int, ...]) -> bool:
        for axis in self.select:
            if row[axis.column] not in axis.allowed:
                return False
        if not self.unless:
            return True
        return any(row[axis.column] not in axis.allowed for axis in self.unless)


def _allowed_numbers(select: Mapping[str, tuple[Scalar, ...]], axes: Axes) -> list[_AllowedNumbers]:
    conditions = []
    for column, (axis, values) in enumerate(axes.items()):
        if axis in select:
            wanted = value_keys(select[axis])
            allowed = frozenset(number for number, value in enumerate(values) if value_key(value) in wanted)
            conditions.append(_AllowedNumbers(column, allowed))
    return conditions


def _numbered_cells(axes: Axes, axes_of: Mapping[str, Axes]) -> Iterator[tuple[tuple[int, ...], Cell]]:
    """Yield each cell with its values as numbers; the number of values stands for an axis that the model lacks."""
    number_of: dict[str, dict[tuple[str, Scalar], int]] = {}
    for axis, values in axes.items():
        number_of[axis] = {value_key(value): number for number, value in enumerate(values)}
    # Each model has axes of its own, and each of its values a number among those of all models.
    for own in axes_of.values():
        user_axes = [name for name in own if name not in AXES]
        numbers = []
        for axis, numbers_of_values in number_of.items():
            if axis in own:
                numbers.append([numbers_of_values[value_key(value)] for value in own[axis]])
            else:
                # A number that no value has: a rule that selects by this axis matches none of the model's cells.
                numbers.append([len(numbers_of_values)])
        # Both products count in the same order: an axis that the model lacks has one number, and changes nothing.
        for row, chosen in zip(product(*numbers), product(*own.values()), strict=True):
            given = dict(zip(own, chosen, strict=True))
            known = {name: str(given[name]) for name in AXES}
            yield row, Cell(**known, user=tuple((name, given[name]) for name in user_axes))
