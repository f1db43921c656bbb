"""Expansion: axes and rules to planned cells. A pure function of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Final

from pytest_torchcompile.axes import Axes, same
from pytest_torchcompile.cell import AXES, Cell
from pytest_torchcompile.checks import default_limits
from pytest_torchcompile.rules import OUTCOMES, Rule

__all__ = ["MAX_CELLS", "Excluded", "Expansion", "PlannedCell", "count", "expand"]

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


def count(axes: Axes) -> int:
    """Return the number of combinations of the axes' values."""
    return prod(map(len, axes.values()))


def expand(axes: Axes, rules: Sequence[Rule], ignored: frozenset[int] = frozenset(),
           limits: dict[str, float] | None = None) -> Expansion:
    """Multiply the axes and ask the rules.

    The first ``exclude``, ``skip`` or ``xfail`` that matches decides, ``ignored`` ones (by index) left aside.
    Every ``limits`` that matches adds to ``limits`` (the defaults), later ones over earlier ones; every ``also`` its
    checks, and their default limits where no other rule sets them.
    """
    conditions = [_conditions(rule, axes) for rule in rules]
    deciding = [(k, conditions[k]) for k, rule in enumerate(rules) if rule.verb in OUTCOMES]
    adding = [(k, conditions[k]) for k, rule in enumerate(rules) if rule.verb not in OUTCOMES]
    found = Expansion([], [], [], [0] * len(rules), [0] * len(rules))
    cells = _cells(axes)
    for row in product(*(range(len(values)) for values in axes.values())):
        cell = next(cells)
        outcome: Rule | None = None
        for k, condition in deciding:
            if all(row[column] in allowed for column, allowed in condition):
                found.matches[k] += 1
                if outcome is None:
                    found.hits[k] += 1
                    outcome = None if k in ignored else rules[k]
        if outcome is not None and outcome.verb == "exclude":
            found.excluded.append(Excluded(cell, outcome.reason, outcome.issue, outcome.where))
            continue
        own = dict(limits or {})
        also: list[str] = []
        for k, condition in adding:
            if all(row[column] in allowed for column, allowed in condition):
                found.hits[k] += 1
                found.matches[k] += 1
                if rules[k].verb == "also":
                    also += [name for name in rules[k].checks if name not in also]
                    own = default_limits(rules[k].checks) | own
                else:
                    own |= rules[k].limits
        found.planned.append(_planned(cell, outcome, own, tuple(also)))
        found.rows.append(row)
    return found


def _planned(cell: Cell, rule: Rule | None, limits: dict[str, float], also: tuple[str, ...]) -> PlannedCell:
    if rule is None:
        return PlannedCell(cell, limits=limits, also=also)
    until = rule.until.isoformat() if rule.until else ""
    return PlannedCell(cell, rule.verb, rule.reason, rule.issue, until, rule.checks, limits, rule.where, also)


def _conditions(rule: Rule, axes: Axes) -> list[tuple[int, frozenset[int]]]:
    """The rule's selector as (column, numbers of the values): rows are compared as numbers."""
    conditions = []
    for column, (axis, values) in enumerate(axes.items()):
        if axis in rule.select:
            wanted = {same(value) for value in rule.select[axis]}
            allowed = frozenset(k for k, value in enumerate(values) if same(value) in wanted)
            conditions.append((column, allowed))
    return conditions


def _cells(axes: Axes) -> Iterator[Cell]:
    """Yield the cells in the order of the product."""
    known = [name for name in axes if name in AXES]
    own = [name for name in axes if name not in AXES]
    for values in product(*(axes[name] for name in known)):
        given = dict(zip(known, map(str, values), strict=True))
        for rest in product(*(axes[name] for name in own)):
            yield Cell(**given, user=tuple(zip(own, rest, strict=True)))
