"""Permitted: what passing cells have all the same, because limits of the matrix allow it; and what is expected to fail.

A run is green after ``pytest-torchcompile accept``, and its graph breaks are still there. So each passing cell with
limits of its own is judged again by the limits that every cell has by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pytest_torchcompile.checks import CHECKS, default_limits
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.observation import Observation
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
    planned = cell["planned"]
    passing = [name for name, check in judged.verdicts.items() if check["verdict"] == "pass" and name in CHECKS]
    # A report of schema 1.0 does not tell its limits.
    if planned is None or not cell["observation"] or not passing:
        return {}
    defaults = default_limits(planned["checks"], str(cell["axes"].get("wrapper", "none")))
    if planned["limits"].items() <= defaults.items():
        return {}
    try:
        again = judge_observation(Observation.from_dict(cell["observation"]), passing, defaults)
    # Another version, or a careless edit, may have any section; that it can't be judged is told elsewhere.
    except Exception:
        return {}
    return {name: each.to_dict() for name, each in again.items() if each.verdict == "fail"}


def permitted_findings(cells: Iterable[Mapping[str, Any]], judged: Mapping[str, JudgedCell]) -> Iterator[Finding]:
    """One note on what limits allow, and one on what is expected to fail; neither changes the verdict."""
    causes = permitted_causes(cells, judged)
    if causes:
        names = dict.fromkeys(name for cause in causes for name in cause.cells)
        text = f"{count(len(names), 'cell holds', 'cells hold')} only by limits of the matrix, which allow: " \
               f"{first_names(map(_cause_in_words, causes))}"
        yield Finding("limits", "note", text, tuple(names))
    reasons: dict[str, list[str]] = {}
    for name, cell in judged.items():
        for check in cell.verdicts.values():
            if check["verdict"] == "xfail":
                reasons.setdefault(check.get("note", ""), []).append(name)
                break
    if reasons:
        expected = [name for names in reasons.values() for name in names]
        text = f"{count(len(expected), 'cell fails', 'cells fail')} as the matrix expects"
        if told := first_names(filter(None, reasons)):
            text += f": {told}"
        yield Finding("xfail", "note", text, tuple(expected))


def _cause_in_words(cause: Cause) -> str:
    """``graph_breaks at models.py:12 (3 cells)``."""
    where = f" at {cause.problem.place}" if cause.problem.place else ""
    return f"{cause.checks[0]}{where} ({count(len(cause.cells), 'cell')})"
