"""Policy: what a release asks of a run beyond the default rule, and what it lets pass, with reasons. Plain data."""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import yaml

from pytest_torchcompile.cell import Scalar
from pytest_torchcompile.checks import CHECKS, LIMITS
from pytest_torchcompile.errors import nearest
from pytest_torchcompile.plan.axes import value_key
from pytest_torchcompile.plan.reader import Reader
from pytest_torchcompile.report.metrics import METRICS
from pytest_torchcompile.report.schema import TEST_LANE

__all__ = ["BASELINE", "COMMIT", "HEAD", "RATIOS", "AllowedFailure", "AllowedSkip", "LimitRule", "PassRate", "Policy",
           "ReuseRule", "Selector", "axes_of_cells", "bound_kind", "judging_checks"]

RATIOS: Final = {f"{name}_ratio": name for name, metric in METRICS.items() if not metric.whole}
"""Limits that are multiples of the baseline's value."""
HEAD: Final = "HEAD"
"""Names the commit that is checked out."""
COMMIT: Final = re.compile("[0-9a-f]{7,64}")
BASELINE: Final[dict[str, str]] = {
    "failures": "a check that held in the baseline and fails now",
    "graph_breaks": "a graph break at a line that had none",
    "recompiles": "more recompiles than before",
    "slower": "slower by more than the spread",
    "gone": "cells that ran in the baseline and do not run now",
}


def bound_kind(name: str) -> str:
    """``max`` or ``min``: which way a limit of that name bounds."""
    if name in LIMITS:
        return LIMITS[name].kind
    return METRICS[RATIOS.get(name, name)].kind


def judging_checks(limit: str) -> tuple[str, ...]:
    """The checks that judge by this limit of the matrix; none for a limit that only policies have."""
    checks = []
    for name, entry in CHECKS.items():
        if any(each.name == limit for each in entry.limits):
            checks.append(name)
    return tuple(checks)


def _matches_pattern(nodeid: str, pattern: str) -> bool:
    """``*`` is anything; all else is itself, for node ids have brackets."""
    expression = ".*".join(map(re.escape, pattern.split("*")))
    return re.fullmatch(expression, nodeid, re.DOTALL) is not None


def axes_of_cells(plan: Iterable[Mapping[str, Scalar]]) -> dict[str, None]:
    """Every axis that some cell has, in the order of the report."""
    axes: dict[str, None] = {}
    for cell in plan:
        axes.update(dict.fromkeys(cell))
    return axes


class Selectable(Protocol):
    """What a selector looks at: a cell, or a test."""

    @property
    def id(self) -> str:
        """The cell's id, or the test's node id."""

    @property
    def lane(self) -> str:
        """Where it ran; a test's lane is a name of its own."""

    @property
    def axes(self) -> Mapping[str, Any]:
        """Axis to value."""


@dataclass(frozen=True)
class Selector:
    """Some of the cells: each axis named has one of the values named."""

    values: dict[str, tuple[Scalar, ...]]
    node: yaml.Node
    axes: dict[str, yaml.Node] = field(default_factory=dict)
    """Where each axis stands in the policy."""
    tests: tuple[str, ...] = ()
    """Patterns of node ids, in which ``*`` stands for anything; then it selects tests, and no cell."""

    def covers(self, judged: Selectable) -> bool:
        """Is this cell, or this test, one of them?"""
        # Without this a selector of cells without axes would cover every test.
        if judged.lane == TEST_LANE:
            return any(_matches_pattern(judged.id, pattern) for pattern in self.tests)
        return not self.tests and self.matches(judged.axes)

    def matches(self, axes: Mapping[str, Scalar]) -> bool:
        """Is the cell with these axes one of them?"""
        for axis, values in self.values.items():
            if axis not in axes or value_key(axes[axis]) not in map(value_key, values):
                return False
        return True

    def __str__(self) -> str:
        if self.tests:
            return " | ".join(self.tests)
        chosen = [f"{axis} = {' | '.join(map(str, values))}" for axis, values in self.values.items()]
        return ", ".join(chosen) or "every cell"

    def hold_against(self, reader: Reader, plan: Iterable[Mapping[str, Scalar]], tests: Collection[str] = ()) -> None:
        """Note what of the selector the run does not have: a rule for a misspelt model would never bite."""
        if self.tests:
            self._hold_patterns_against(reader, tests)
            return
        plan = list(plan)
        known = axes_of_cells(plan)
        before = len(reader.mistakes)
        for axis in self.values:
            if axis in known:
                self._hold_axis_against(reader, axis, plan)
            else:
                reader.wrong(self.axes[axis], f"unknown axis {axis!r}; {nearest(axis, known)}")
        # Where a value is unknown that has been said, and of course nothing matches.
        if len(reader.mistakes) == before and not any(map(self.matches, plan)):
            reader.wrong(self.node, f"matches no cell: {self}; remove it, or correct a value")

    def _hold_patterns_against(self, reader: Reader, tests: Collection[str]) -> None:
        for pattern in self.tests:
            if not any(_matches_pattern(test, pattern) for test in tests):
                reader.wrong(self.node, f"matches no test that uses our fixtures: {pattern}; "
                                        f"{nearest(pattern, tests)}")

    def _hold_axis_against(self, reader: Reader, axis: str, plan: Iterable[Mapping[str, Scalar]]) -> None:
        there = {value_key(axes[axis]): axes[axis] for axes in plan if axis in axes}
        noun = f"value of axis {axis!r}"
        if axis == "model":
            noun = "model"
        for value in self.values[axis]:
            if value_key(value) not in there:
                known = map(str, there.values())
                reader.wrong(self.axes[axis], f"{value!r} is not a {noun} in this run; {nearest(str(value), known)}")


@dataclass(frozen=True)
class LimitRule:
    """Limits that hold for some cells, over those of the matrix."""

    when: Selector
    limits: dict[str, float]
    nodes: dict[str, yaml.Node]
    """Where each number stands."""


@dataclass(frozen=True)
class AllowedFailure:
    """Failures that are known, until a day."""

    cells: Selector
    reason: str
    issue: str
    until: datetime.date
    checks: tuple[str, ...] = ()
    """Checks and limits; empty: any."""
    verdicts: tuple[str, ...] = ("fail",)
    contains: str = ""
    """A text that the problem's message or evidence has."""
    at_most: int | None = None
    """The largest number of cells that may fail so."""
    at_most_node: yaml.Node | None = None

    def __str__(self) -> str:
        return f"{self.reason} ({self.issue}; until {self.until})"


@dataclass(frozen=True)
class AllowedSkip:
    """Cells that this machine may leave out."""

    cells: Selector
    reason: str
    contains: str = ""
    """A text that the cell's own reason has."""


@dataclass(frozen=True)
class PassRate:
    """The share of the cells with one value of an axis (all cells, if ``axis`` is empty) that must be good."""

    rate: float
    node: yaml.Node
    axis: str = ""
    only: Selector | None = None
    """One value of the axis; without it every value, each by itself."""


@dataclass(frozen=True)
class ReuseRule:
    """Which results of earlier runs may be reused."""

    forbidden: bool = False
    max_age: datetime.timedelta | None = None
    """How long ago the oldest may have been found."""
    at_most: float = 1.0
    """The largest share of the cells that have such a result."""


@dataclass(frozen=True)
class Policy:
    """A policy file; without one, this with its defaults."""

    path: str = ""
    matrix: str = ""
    """The matrix file that the reports must be of."""
    gates: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    may_differ: frozenset[str] = frozenset()
    devices: tuple[str, ...] = ()
    ran_at_least: int | None = None
    tests_ran_at_least: int | None = None
    pass_rates: tuple[PassRate, ...] = ()
    limits: tuple[LimitRule, ...] = ()
    allowed_failures: tuple[AllowedFailure, ...] = ()
    allowed_skips: tuple[AllowedSkip, ...] = ()
    baseline: dict[str, str] = field(default_factory=dict)
    """Kind of change to ``fail`` or ``note``; not named: ``fail``."""
    commit: str = ""
    """The commit that the reports must be of: a SHA, or HEAD of the policy's folder; empty: any."""
    max_age: datetime.timedelta | None = None
    """How long ago the run may have ended."""
    reuse: ReuseRule = field(default_factory=ReuseRule)
    sealed: bool = False
    """Must each report be sealed?"""
    other_tests: bool = False
    """Is it a failure that tests of the same pytest run failed which are neither cells nor use our fixtures?"""
    ratchet: bool = False
    """Must limits on counts be as low as what was measured?"""
    places: dict[str, yaml.Node] = field(default_factory=dict)
    """Where each section's value stands."""

    def limits_of(self, axes: Mapping[str, Scalar]) -> dict[str, tuple[float, LimitRule]]:
        """The limits of a cell, each with its rule; a later rule goes over an earlier one."""
        limits: dict[str, tuple[float, LimitRule]] = {}
        for rule in self.limits:
            # Every rule that matches counts; of one limit the last one does.
            if rule.when.matches(axes):
                for name, number in rule.limits.items():
                    limits[name] = number, rule
        return limits

    def line(self, node: yaml.Node | None) -> int:
        """Line of a node, from 1; 0 without one."""
        if node is None:
            return 0
        return node.start_mark.line + 1

    def line_of(self, section: str) -> int:
        """Line of a section's value."""
        return self.line(self.places[section])

    def hold_against(self, plan: Iterable[Mapping[str, Scalar]], environment: Mapping[str, Any],
                     tests: Collection[str] = ()) -> None:
        """Hold what the policy names against what the run has.

        Raises :class:`~pytest_torchcompile.errors.MatrixError` with ``file:line:column`` for an axis, a value or a key
        that is not there, and for a rule that matches no cell.
        """
        # All mistakes are told at once, in the order of the file.
        reader = Reader(self.path)
        plan = list(plan)
        for rule in self.limits:
            rule.when.hold_against(reader, plan, tests)
        for failure in self.allowed_failures:
            failure.cells.hold_against(reader, plan, tests)
        for skip in self.allowed_skips:
            skip.cells.hold_against(reader, plan, tests)
        known = axes_of_cells(plan)
        for rate in self.pass_rates:
            if rate.only is not None:
                rate.only.hold_against(reader, plan)
            elif rate.axis and rate.axis not in known:
                reader.wrong(rate.node, f"unknown axis {rate.axis!r}; {nearest(rate.axis, known)}")
        # It is empty where no cell ran; then nobody knows which keys there are.
        if environment:
            for name in self.environment:
                if name not in environment:
                    reader.wrong(self.places["environment"], f"environment: reports do not tell {name!r}; "
                                                             f"{nearest(name, environment)}")
        reader.finish()
