"""Causes: what failing cells have in common, so that ten thousand red squares read as the few things to mend."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from pytest_torchcompile.report.facts import Facts, Problem, Verdict

__all__ = ["Cause", "causes"]

_REST = re.compile(r"\d.*", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w:.])\d[\d.,]*(?:e[+-]?\d+)?\b")
"""A number that is no part of a name, of a version or of a place (``file:line``)."""
_STEP = re.compile(r"^step \d+: ")
_RANKS = re.compile(r"^(?:every rank|ranks? \d+(?:, \d+)*): ")
"""Which ranks of a cell have a problem (:mod:`pytest_torchcompile.verdicts`)."""
_LEAVES = frozenset({"equivalence", "gradients", "training_steps", "aliasing"})
"""Checks whose problems begin with the name of an output, a gradient, ..."""
_EMPTY = "nothing to judge"
"""How a check begins that has nothing to say because another one of the cell failed."""
_RAISED = "the compiled run raised"
"""How `compiles` tells of an exception: the same text in two models is the same fault of a backend."""
_UNCOVERED = "of the model's operator calls ran inside compiled graphs"
"""How `compiles` says that too little was compiled; where a graph breaks, that comes of it."""


@dataclass
class Cause:
    """One thing that is wrong, and the cells in which it is."""

    problem: Problem
    """As the first of the cells has it; numbers differ in the others."""
    checks: list[str] = field(default_factory=list)
    verdict: str = "fail"
    cells: list[str] = field(default_factory=list)
    """Ids, in the order of the report."""


def causes(cells: Iterable[Facts], verdicts: Iterable[str] = ("fail", "error", "timeout", "crash", "xpass"),
           ) -> list[Cause]:
    """Group the problems of some cells, those in most cells first, of equals those with a place.

    One place in the user's code is one cause. Without a place, problems are one cause if their texts differ in numbers
    only: what a check finds wrong, only within one model; of values that differ, whichever output or gradient it is.
    """
    wanted = frozenset(verdicts)
    found: dict[tuple[str, ...], Cause] = {}
    for facts in cells:
        problems = [(v, p) for v in facts.verdicts if v.verdict in wanted for p in v.problems]
        broken = any(v.check == "graph_breaks" and v.verdict == "fail" for v, _ in problems)
        own = [(v, p) for v, p in problems if not _follows(v, p, broken)] or problems
        for verdict, problem in own:
            key = (verdict.check, problem.place) if problem.place else ("", _kind(verdict, problem.message, facts))
            cause = found.setdefault((verdict.verdict, *key), Cause(problem, verdict=verdict.verdict))
            if verdict.check not in cause.checks:
                cause.checks.append(verdict.check)
            if cause.cells[-1:] != [facts.id]:
                cause.cells.append(facts.id)
    return sorted(found.values(), key=lambda cause: (-len(cause.cells), not cause.problem.place))


def _follows(verdict: Verdict, problem: Problem, broken: bool) -> bool:
    """Is it only what comes of another problem of the same cell?"""
    message = _RANKS.sub("", problem.message)
    uncovered = verdict.check == "compiles" and _UNCOVERED in message
    return message.startswith(_EMPTY) or (broken and uncovered)


def _kind(verdict: Verdict, message: str, facts: Facts) -> str:
    """What a problem says, without what differs from cell to cell; a crash is one for all checks of a cell."""
    message = _RANKS.sub("", message)
    if verdict.verdict != "fail" or message.startswith(_RAISED):
        return _NUMBER.sub("#", message)
    model = f"{facts.axes.get('model')}: {verdict.check}: "
    _, colon, rest = _STEP.sub("", message).partition(": ")
    if verdict.check in _LEAVES and colon:  # the output or gradient comes first
        return model + _REST.sub("", rest)
    return model + _NUMBER.sub("#", message)
