"""Permitted: what passing cells have all the same, because limits of the matrix allow it; and what is expected to fail.

A run is green after ``pytest-torchcompile accept``, and its graph breaks are still there. So each passing cell with
limits of its own is judged again by the limits that every cell has by default.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from pytest_torchcompile.checks import CHECKS, LIMITS, default_limits
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.observation import Observation, portable_path
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.causes import Cause, group_causes
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.finding import Finding
from pytest_torchcompile.run.verdicts import judge_observation

__all__ = ["permitted_causes", "permitted_findings"]


def permitted_causes(cells: Iterable[Mapping[str, Any]], judged: Mapping[str, JudgedCell]) -> list[Cause]:
    """What limits of the matrix allow, the worst first. ``cells``: of the report; ``judged``: by id."""
    facts = []
    for cell in cells:
        if found := _checks_beyond_defaults(cell, judged[cell["id"]]):
            facts.append(Facts({"id": cell["id"], "axes": cell["axes"], "status": "fail", "checks": found}))
    return group_causes(facts)


def _checks_beyond_defaults(cell: Mapping[str, Any], judged: JudgedCell) -> dict[str, dict[str, Any]]:
    """The checks of a cell that pass, and would not by the limits that nobody has chosen."""
    # A report of schema 1.0 does not tell its limits.
    if cell["planned"] is None:
        return {}
    return _failing_by(cell, judged, _defaults_of(cell))


def _defaults_of(cell: Mapping[str, Any]) -> dict[str, float]:
    """The limits that the cell would have if nobody had chosen any, of the checks that this version knows."""
    known = [name for name in cell["planned"]["checks"] if name in CHECKS]
    return default_limits(known, str(cell["axes"].get("wrapper", "none")))


def _failing_by(cell: Mapping[str, Any], judged: JudgedCell, limits: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """The checks of a cell that pass, and would not by other limits."""
    passing = [name for name, check in judged.verdicts.items() if check["verdict"] == "pass" and name in CHECKS]
    if not cell["observation"] or not passing or cell["planned"]["limits"].items() <= limits.items():
        return {}
    try:
        again = judge_observation(Observation.from_dict(cell["observation"]), passing, limits)
    # Another version, or a careless edit, may have any section; that it can't be judged is told elsewhere.
    except Exception:
        return {}
    return {name: each.to_dict() for name, each in again.items() if each.verdict == "fail"}


def _needed_limits(cell: Mapping[str, Any], judged: JudgedCell) -> Iterator[tuple[str, float, float | None]]:
    """Each limit that is not the default, and without which the cell would fail: its name, its value, the default."""
    own, defaults = cell["planned"]["limits"], _defaults_of(cell)
    for name, value in own.items():
        default = defaults.get(name)
        # A report of another version may have limits that this one does not know.
        if value == default or name not in LIMITS:
            continue
        others = {other: limit for other, limit in own.items() if other != name}
        if default is not None:
            others[name] = default
        # One by one: a lowered coverage lies hidden behind the graph break that it comes from.
        if _failing_by(cell, judged, others):
            yield name, value, default


def permitted_findings(cells: Iterable[Mapping[str, Any]], judged: Mapping[str, JudgedCell]) -> Iterator[Finding]:
    """One note on what limits allow, and one on what is expected to fail; neither changes the verdict."""
    cells = list(cells)
    causes = permitted_causes(cells, judged)
    if causes:
        # Two causes may lie in one cell, which is counted once.
        names = dict.fromkeys(itertools.chain.from_iterable(cause.cells for cause in causes))
        text = f"{count(len(names), 'cell holds', 'cells hold')} only by limits of the matrix, which allow: " \
               f"{first_names(map(_cause_in_words, causes))}{_limits_in_words(cells, judged, names)}"
        yield Finding("limits", "note", text, tuple(names))
    reasons: dict[str, list[str]] = {}
    for name, cell in judged.items():
        for check in cell.verdicts.values():
            if check["verdict"] == "xfail":
                reasons.setdefault(check.get("note", ""), []).append(name)
                break
    if reasons:
        expected = list(itertools.chain.from_iterable(reasons.values()))
        text = f"{count(len(expected), 'cell fails', 'cells fail')} as the matrix expects"
        if told := first_names(filter(None, reasons)):
            text += f": {told}"
        yield Finding("xfail", "note", text, tuple(expected))


def _cause_in_words(cause: Cause) -> str:
    """``graph_breaks at models.py:12 (3 cells)``."""
    # Of an installed package without the folder of this environment.
    where = f" at {portable_path(cause.problem.place)}" if cause.problem.place else ""
    return f"{cause.checks[0]}{where} ({count(len(cause.cells), 'cell')})"


def _limits_in_words(cells: Iterable[Mapping[str, Any]], judged: Mapping[str, JudgedCell],
                     names: Collection[str]) -> str:
    """``; by graph_breaks 1 instead of 0 (3 cells)``: each limit that is needed, at its loosest."""
    found: dict[tuple[str, float | None], list[float]] = {}
    for cell in cells:
        if cell["id"] in names:
            for name, value, default in _needed_limits(cell, judged[cell["id"]]):
                found.setdefault((name, default), []).append(value)
    words = []
    for (name, default), values in found.items():
        # The loosest tells how far the matrix goes; most cells need less.
        loosest = min(values) if LIMITS[name].kind == "min" else max(values)
        instead = "" if default is None else f" instead of {default:g}"
        words.append(f"{name} {loosest:g}{instead} ({count(len(values), 'cell')})")
    return f"; by {', '.join(words)}" if words else ""
