"""Acceptance: what each cell of a report needs so that it is green, as limits and expected failures. No torch.

Each cell is judged again from its observation, by the matrix as it is now, first with one limit more, then with the
next, until nothing is left that a limit could allow. The checks themselves say which limit that is, in their hints.
What is left then is expected to fail (``xfail``). Wrong numbers are neither, unless somebody names them one by one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pytest_torchcompile.checks import CHECKS, LIMITS, fails_by_wrong_numbers, way_of
from pytest_torchcompile.checks.compiles import broken_library
from pytest_torchcompile.checks.severity import Severity, without_ranks
from pytest_torchcompile.errors import short_line
from pytest_torchcompile.observation import BAD, RAISED, Judgement, Observation, Problem, portable_path
from pytest_torchcompile.plan.matrix import PlannedCell
from pytest_torchcompile.run.verdicts import apply_xfail, judge_observation

__all__ = ["CellNeeds", "Left", "Need", "needs_of_cell"]

_RULE: Final = re.compile(r"`- limits: \{(\w+): ([\d.]+)\}`")
"""How a check's hint names the limit that would allow what it found."""
_STOPWATCH: Final = frozenset({"worth"})
"""Checks whose verdicts depend on the machine's load: what one run measured is no limit."""
_CATEGORIES: Final = {
    "graph_breaks": "graph breaks", "coverage": "coverage", "recompiles": "recompiles", "unexplained": "recompiles",
    "late_recompiles": "recompiles", "fuzz_recompiles": "recompiles", "strides": "strides",
}
_TORCH: Final = "failures of torch"
_LONGEST: Final = 220
"""Characters of a reason."""


@dataclass(frozen=True)
class _KnownBug:
    """A bug of torch, told by what a cell's problem says."""

    words: str
    wrapper: str
    """How the cell's wrapper begins."""
    issue: str


_KNOWN: Final = (
    _KnownBug("RecursionError: maximum recursion depth exceeded", "tp", "pytorch/pytorch#152963"),
    _KnownBug("has no attribute '_local_tensor'", "tp", "pytorch/pytorch#191113"),
)
"""Seen with torch 2.13; ``matrix/default.yaml`` has models that show them."""


@dataclass(frozen=True)
class Need:
    """One limit, or one expected failure, of one cell."""

    category: str
    reason: str
    limits: tuple[tuple[str, float], ...] = ()
    """One limit; empty: the cell is expected to fail."""
    checks: tuple[str, ...] = ()
    """Of an expected failure; empty: any but wrong numbers."""
    issue: str = ""
    place: str = ""

    @property
    def same_as(self) -> tuple[Any, ...]:
        """What needs of several cells have in common that can be one rule."""
        return self.category, self.limits, self.checks, self.issue, self.place


@dataclass(frozen=True)
class Left:
    """A verdict that nothing was written for, and why."""

    cell: str
    check: str
    why: str


@dataclass
class CellNeeds:
    """What one cell needs."""

    planned: PlannedCell
    needs: list[Need] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)


def needs_of_cell(cell: Mapping[str, Any], planned: PlannedCell, named: Collection[str]) -> CellNeeds:
    """What a cell of a report needs. ``named``: checks of it whose wrong numbers are accepted.

    Needs nothing where all of its verdicts are good by the matrix as it is now.
    """
    result = CellNeeds(planned)
    if planned.outcome == "skip" or not cell["selected"]:
        return result
    verdicts = {name: check["verdict"] for name, check in cell["checks"].items()}
    # Causes before what follows from them; a check that this version does not have can't be judged again.
    names = [name for name in CHECKS if verdicts.get(name, "not_run") != "not_run"]
    for name, verdict in verdicts.items():
        if verdict == "not_run":
            result.left.append(Left(planned.cell.id, name, "it has no verdict: run the matrix to its end"))
    if cell["observation"] and names:
        _Acceptance(result, Observation.from_dict(dict(cell["observation"])), names, named).collect()
    return result


@dataclass
class _Acceptance:
    """One cell, judged again and again."""

    result: CellNeeds
    observation: Observation
    names: Sequence[str]
    named: Collection[str]

    def collect(self) -> None:
        """Fill in what is needed and what is left."""
        planned = self.result.planned
        found = self._judge(planned)
        limits: list[Need] = []
        # Each limit may bring another one up, or make it needless: a graph break explains what runs eagerly around it.
        while (need := self._next_limit(found, planned)) is not None:
            planned = replace(planned, limits={**planned.limits, **dict(need.limits)})
            limits = [other for other in limits if other.limits[0][0] != need.limits[0][0]] + [need]
            found = self._judge(planned)
        expected = self._expected_failure(found)
        self.result.needs += limits
        if expected is not None and not expected.checks:
            # What is expected to fail as a whole needs no limits beside.
            self.result.needs = []
        if expected is not None:
            self.result.needs.append(expected)

    def _judge(self, planned: PlannedCell) -> dict[str, Judgement]:
        """The verdicts that no release takes."""
        judgements = apply_xfail(judge_observation(self.observation, self.names, planned.limits), planned)
        return {name: judgement for name, judgement in judgements.items() if judgement.verdict in BAD}

    def _next_limit(self, found: Mapping[str, Judgement], planned: PlannedCell) -> Need | None:
        """The first limit that would allow something, and is looser than the cell's own."""
        for name, judgement in found.items():
            if judgement.verdict != "fail" or name in _STOPWATCH or _is_wrong(name, judgement):
                continue
            for problem in judgement.problems:
                rule = _RULE.search(problem.hint)
                if rule is None or not _is_looser(rule[1], float(rule[2]), planned.limits):
                    continue
                value = int(rule[2]) if LIMITS[rule[1]].whole else float(rule[2])
                category = _CATEGORIES.get(rule[1], "limits")
                reason = _reason_of(problem, len(judgement.problems))
                return Need(category, reason, limits=((rule[1], value),), place=problem.place)
        return None

    def _expected_failure(self, found: Mapping[str, Judgement]) -> Need | None:
        """The expected failure of what no limit allows; what must not be expected is left."""
        expected: dict[str, Judgement] = {}
        broken = _broken_cache(found.values())
        for name, judgement in found.items():
            why = broken or self._why_left(name, judgement)
            if why:
                self.result.left.append(Left(self.result.planned.cell.id, name, why))
            else:
                expected[name] = judgement
        checks = self._checks_to_name(expected)
        if not expected:
            return None
        first_name, first = next(iter(expected.items()))
        for name, judgement in expected.items():
            # What raised is the reason of all the others, so the rule is named by it.
            if _has_raised(judgement):
                first_name, first = name, judgement
                break
        problem = first.problems[0]
        need = Need(_effect_of(first_name, problem), f"{first_name}: {_reason_of(problem)}", checks=checks,
                    place=problem.place)
        if first.verdict == "crash" or _has_raised(first):
            need = replace(need, category=_TORCH, issue=self._known_issue(first))
        return need

    def _checks_to_name(self, expected: dict[str, Judgement]) -> tuple[str, ...]:
        """The checks that the ``xfail`` names; none where that would hide wrong numbers that may come later.

        An ``xfail`` without checks hides none. Where wrong numbers were accepted by name it has to name checks, and
        then the others that may tell of wrong numbers are left.
        """
        risky = [name for name in expected if _may_tell_wrong_numbers(name) and name not in self.named]
        if not any(_is_wrong(name, judgement) for name, judgement in expected.items()):
            return () if risky else tuple(expected)
        for name in risky:
            message = expected.pop(name).problems[0].message
            why = (f"to name it beside would hide its wrong numbers too: --wrong-numbers "
                   f"{self.result.planned.cell.id}:{name} does ({short_line(message, _LONGEST)})")
            self.result.left.append(Left(self.result.planned.cell.id, name, why))
        return tuple(expected)

    def _why_left(self, name: str, judgement: Judgement) -> str:
        """Why nothing may be written for a verdict; empty if something may."""
        planned = self.result.planned
        said = short_line(judgement.problems[0].message, _LONGEST) if judgement.problems else ""
        if judgement.verdict == "xpass":
            return f"it passes, although {planned.rule} expects it to fail: remove that rule, or the check from it"
        if judgement.verdict == "error":
            return f"it could not be judged: {said}"
        if judgement.verdict == "timeout":
            return f"it ran out of time, which says little of the model: raise --compile-timeout ({said})"
        if name in _STOPWATCH:
            return f"it depends on a stopwatch: choose a limit by hand ({said})"
        if _is_wrong(name, judgement) and name not in self.named:
            return f"wrong numbers are accepted only by name: --wrong-numbers {planned.cell.id}:{name} ({said})"
        if planned.outcome == "xfail":
            return f"{planned.rule} decides this cell already: add the check there ({said})"
        return ""

    def _known_issue(self, judgement: Judgement) -> str:
        problem = judgement.problems[0]
        said = f"{problem.message}\n{problem.evidence}"
        for bug in _KNOWN:
            if self.result.planned.cell.wrapper.startswith(bug.wrapper) and bug.words in said:
                return bug.issue
        return ""


def _broken_cache(judgements: Iterable[Judgement]) -> str:
    """Why nothing may be written for a cell that met a broken file in torch's cache; empty if it met none."""
    for judgement in judgements:
        for problem in judgement.problems:
            if library := broken_library(f"{problem.message}\n{problem.evidence}"):
                return ("a file in torch's cache is broken, which says nothing of the model: "
                        f"`rm {library}`, and run again")
    return ""


def _may_tell_wrong_numbers(check: str) -> bool:
    """Can the check fail, in some way, because the model computes something else?"""
    effects = [CHECKS[check].effect, *(way.effect for way in CHECKS[check].ways)]
    return any(effect.severity == Severity.WRONG_NUMBERS for effect in effects)


def _effect_of(check: str, problem: Problem) -> str:
    """What becomes of the model, in a few words."""
    way = way_of(check, problem.message)
    return way.effect.one if way else CHECKS[check].effect.one


def _is_wrong(name: str, judgement: Judgement) -> bool:
    return fails_by_wrong_numbers(name, judgement.verdict, [problem.message for problem in judgement.problems])


def _has_raised(judgement: Judgement) -> bool:
    return any(without_ranks(problem.message).startswith(RAISED) for problem in judgement.problems)


def _is_looser(name: str, value: float, limits: Mapping[str, float]) -> bool:
    """Does this value allow more than the cell's own limit? Else to write it would change nothing."""
    if name not in LIMITS:
        return False
    own = limits.get(name)
    if own is None:
        return True
    return value > own if LIMITS[name].kind == "max" else value < own


def _reason_of(problem: Problem, number: int = 1) -> str:
    """What was found and where, in one line."""
    message = re.sub(r"^graph break \(.*?\): ", "", without_ranks(problem.message))
    reason = short_line(message, _LONGEST)
    if problem.place:
        # The matrix is a file of the project: an installed library lies elsewhere on each machine.
        reason = f"{reason} at {portable_path(problem.place)}"
    if number > 1:
        reason += f", and {number - 1} more"
    return reason
