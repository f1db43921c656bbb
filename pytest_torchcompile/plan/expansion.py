"""Expansion: axes and rules to planned cells. A pure function of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Final

from pytest_torchcompile.cell import AXES, Cell, Scalar
from pytest_torchcompile.checks import default_limits
from pytest_torchcompile.plan.axes import Axes, value_key
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
    conditions = [_Condition.of(rule, axes) for rule in rules]
    deciding = [(k, conditions[k]) for k, rule in enumerate(rules) if rule.verb in OUTCOMES]
    adding = [(k, conditions[k]) for k, rule in enumerate(rules) if rule.verb not in OUTCOMES]
    found = Expansion([], [], [], [0] * len(rules), [0] * len(rules))
    for row, cell in _cells(axes, axes_of):
        outcome: Rule | None = None
        expired: Rule | None = None
        for k, condition in deciding:
            if condition.holds(row):
                found.matches[k] += 1
                if outcome is not None:
                    continue
                found.hits[k] += 1
                if k in elsewhere:
                    continue
                if k in ignored:
                    expired = expired or rules[k]
                else:
                    outcome = rules[k]
        if outcome is not None and outcome.verb == "exclude":
            found.excluded.append(Excluded(cell, outcome.reason, outcome.issue, outcome.where))
            continue
        own = dict(limits or {})
        own |= {name: value for name, value in limits_of(cell.wrapper).items() if name in own}
        also: list[str] = []
        for k, condition in adding:
            if condition.holds(row):
                found.hits[k] += 1
                found.matches[k] += 1
                if k in elsewhere:
                    continue
                if rules[k].verb == "also":
                    also += [name for name in rules[k].checks if name not in also]
                    own = default_limits(rules[k].checks, cell.wrapper) | own
                else:
                    own |= rules[k].limits
        planned = _planned(cell, outcome, own, tuple(also))
        if outcome is None and expired is not None:
            planned = replace(planned, expired=expired)
        found.planned.append(planned)
        found.rows.append(row)
    return found


def _planned(cell: Cell, rule: Rule | None, limits: dict[str, float], also: tuple[str, ...]) -> PlannedCell:
    if rule is None:
        return PlannedCell(cell, limits=limits, also=also)
    until = rule.until.isoformat() if rule.until else ""
    return PlannedCell(cell, rule.verb, rule.reason, rule.issue, until, rule.checks, limits, rule.where, also)


@dataclass(frozen=True, slots=True)
class _Condition:
    """A rule's condition as (column, numbers of the values): rows are compared as numbers."""

    select: list[tuple[int, frozenset[int]]]
    unless: list[tuple[int, frozenset[int]]]

    @classmethod
    def of(cls, rule: Rule, axes: Axes) -> _Condition:
        return cls(_numbers(rule.select, axes), _numbers(rule.unless, axes))

    def holds(self, row: tuple[int, ...]) -> bool:
        if not all(row[column] in allowed for column, allowed in self.select):
            return False
        return not self.unless or not all(row[column] in allowed for column, allowed in self.unless)


def _numbers(select: Mapping[str, tuple[Scalar, ...]], axes: Axes) -> list[tuple[int, frozenset[int]]]:
    found = []
    for column, (axis, values) in enumerate(axes.items()):
        if axis in select:
            wanted = {value_key(value) for value in select[axis]}
            found.append((column, frozenset(k for k, value in enumerate(values) if value_key(value) in wanted)))
    return found


def _cells(axes: Axes, axes_of: Mapping[str, Axes]) -> Iterator[tuple[tuple[int, ...], Cell]]:
    """Yield each cell with its values as numbers; the number of values stands for an axis that the model lacks."""
    places = {axis: {value_key(value): k for k, value in enumerate(values)} for axis, values in axes.items()}
    for own in axes_of.values():
        user = [name for name in own if name not in AXES]
        numbers = [[places[axis][value_key(value)] for value in own[axis]] if axis in own else [len(places[axis])]
                   for axis in axes]
        for row, values in zip(product(*numbers), product(*own.values()), strict=True):
            given = dict(zip(own, values, strict=True))
            known = {name: str(given[name]) for name in AXES}
            yield row, Cell(**known, user=tuple((name, given[name]) for name in user))
