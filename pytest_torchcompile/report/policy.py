"""Policy: what a release asks of a run beyond the default rule, and what it lets pass, with reasons. Plain data."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from pytest_torchcompile.axes import same
from pytest_torchcompile.cell import Scalar
from pytest_torchcompile.checks import CHECKS, LIMITS
from pytest_torchcompile.errors import nearest
from pytest_torchcompile.report.metrics import METRICS
from pytest_torchcompile.yamlreader import Reader

__all__ = ["BASELINE", "RATIOS", "AllowedFailure", "AllowedSkip", "LimitRule", "PassRate", "Policy", "Selector",
           "bounds", "owners"]

RATIOS: Final = {f"{name}_ratio": name for name, metric in METRICS.items() if not metric.whole}
"""Limits that are multiples of the baseline's value."""
BASELINE: Final[dict[str, str]] = {
    "failures": "a check that held in the baseline and fails now",
    "graph_breaks": "a graph break at a line that had none",
    "recompiles": "more recompiles than before",
    "slower": "slower by more than the spread",
    "gone": "cells that ran in the baseline and do not run now",
}


def bounds(name: str) -> str:
    """``max`` or ``min``: which way a limit of that name bounds."""
    return LIMITS[name].kind if name in LIMITS else METRICS[RATIOS.get(name, name)].kind


def owners(limit: str) -> tuple[str, ...]:
    """The checks that judge by this limit of the matrix; none for a limit that only policies have."""
    return tuple(name for name, entry in CHECKS.items() for each in entry.limits if each.name == limit)


@dataclass(frozen=True)
class Selector:
    """Some of the cells: each axis named has one of the values named."""

    values: dict[str, tuple[Scalar, ...]]
    node: yaml.Node
    axes: dict[str, yaml.Node] = field(default_factory=dict)
    """Where each axis stands in the policy."""

    def matches(self, axes: Mapping[str, Scalar]) -> bool:
        """Is the cell with these axes one of them?"""
        return all(axis in axes and any(same(axes[axis]) == same(value) for value in values)
                   for axis, values in self.values.items())

    def __str__(self) -> str:
        chosen = (f"{axis} = {' | '.join(map(str, values))}" for axis, values in self.values.items())
        return ", ".join(chosen) or "every cell"

    def hold_against(self, reader: Reader, plan: Iterable[Mapping[str, Scalar]]) -> None:
        """Note what of the selector the run does not have: a rule for a misspelt model would never bite."""
        plan = list(plan)
        known = dict.fromkeys(axis for axes in plan for axis in axes)
        before = len(reader.problems)
        for axis, values in self.values.items():
            if axis not in known:
                reader.wrong(self.axes[axis], f"unknown axis {axis!r}; {nearest(axis, known)}")
                continue
            there = {same(axes[axis]): axes[axis] for axes in plan if axis in axes}
            for value in values:
                if same(value) not in there:
                    what = "model" if axis == "model" else f"value of axis {axis!r}"
                    reader.wrong(self.axes[axis], f"{value!r} is not a {what} in this run; "
                                                  f"{nearest(str(value), map(str, there.values()))}")
        if len(reader.problems) == before and not any(map(self.matches, plan)):
            reader.wrong(self.node, f"matches no cell: {self}; remove it, or correct a value")


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
    pass_rates: tuple[PassRate, ...] = ()
    limits: tuple[LimitRule, ...] = ()
    allowed_failures: tuple[AllowedFailure, ...] = ()
    allowed_skips: tuple[AllowedSkip, ...] = ()
    baseline: dict[str, str] = field(default_factory=dict)
    """Kind of change to ``fail`` or ``note``; not named: ``fail``."""
    ratchet: bool = False
    """Must limits on counts be as low as what was measured?"""
    places: dict[str, yaml.Node] = field(default_factory=dict)
    """Where each section's value stands."""

    def limits_of(self, axes: Mapping[str, Scalar]) -> dict[str, tuple[float, LimitRule]]:
        """The limits of a cell, each with its rule; a later rule goes over an earlier one."""
        return {name: (number, rule) for rule in self.limits if rule.when.matches(axes)
                for name, number in rule.limits.items()}

    def line(self, node: yaml.Node | None) -> int:
        """Line of a node, from 1; 0 without one."""
        return 0 if node is None else node.start_mark.line + 1

    def hold_against(self, plan: Iterable[Mapping[str, Scalar]], environment: Mapping[str, Any]) -> None:
        """Hold what the policy names against what the run has.

        Raises :class:`~pytest_torchcompile.errors.MatrixError` with ``file:line:column`` for an axis, a value or a key
        that is not there, and for a rule that matches no cell.
        """
        reader = Reader(self.path)
        plan = list(plan)
        for selector in (*(rule.when for rule in self.limits), *(each.cells for each in self.allowed_failures),
                         *(each.cells for each in self.allowed_skips)):
            selector.hold_against(reader, plan)
        for rate in self.pass_rates:
            if rate.only is not None:
                rate.only.hold_against(reader, plan)
            elif rate.axis and rate.axis not in (known := dict.fromkeys(axis for axes in plan for axis in axes)):
                reader.wrong(rate.node, f"unknown axis {rate.axis!r}; {nearest(rate.axis, known)}")
        for name in self.environment if environment else ():
            if name not in environment:
                reader.wrong(self.places["environment"], f"environment: reports do not tell {name!r}; "
                                                         f"{nearest(name, environment)}")
        reader.finish()
