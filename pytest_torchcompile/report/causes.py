"""Causes: what failing cells have in common, so that ten thousand red squares read as the few things to mend.

Terminal, gate, page, JUnit, annotations and playbook all tell what :func:`group_causes` returns, in its order: the
worst first, of equals what is new since the baseline, of these what is in most cells.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pytest_torchcompile.checks import CHECKS, COMPARING, LIMITS, severity, way_of
from pytest_torchcompile.checks.severity import TEST_CHECK, Effect, Severity, without_ranks
from pytest_torchcompile.observation import RAISED, Problem, portable_path
from pytest_torchcompile.oracle.pass_records import blamed_pass
from pytest_torchcompile.report.facts import Facts, Verdict
from pytest_torchcompile.report.metrics import METRICS

__all__ = ["Cause", "Fresh", "check_effect", "effect_of", "first_with_problem", "group_causes",
            "root_check", "told_by"]

_REST = re.compile(r"\d.*", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w:.])\d[\d.,]*(?:e[+-]?\d+)?\b")
"""A number that is no part of a name, of a version or of a place (``file:line``)."""
_STEP = re.compile(r"^step \d+: ")
_FAILING: Final = ("fail", "error", "timeout", "crash", "xpass")
_ALSO: Final = 160
"""Characters of what another check says of the same cause."""
_JUDGED: Final = ("fail", "xfail")
"""Verdicts for which a check looked at what the run recorded; any other is the same at each check of the cell."""

_Key: TypeAlias = "tuple[str, ...]"
"""What two problems have in common that are one cause."""


@dataclass(frozen=True)
class Fresh:
    """What is worse than in the baseline."""

    checks: frozenset[tuple[str, str]] = frozenset()
    """(cell, check) that held and fails now."""
    places: frozenset[tuple[str, str, int]] = frozenset()
    """(cell, file, line) of graph breaks and recompiles that were not there; files by :func:`portable_path`."""


@dataclass
class Cause:
    """One thing that is wrong, and the cells in which it is."""

    problem: Problem
    """As the first of the cells has it; numbers differ in the others."""
    effect: Effect
    verdict: str = "fail"
    checks: list[str] = field(default_factory=list)
    """The checks that show it, the one that has told :attr:`problem` first."""
    consequences: list[str] = field(default_factory=list)
    """Checks that only fail because of it."""
    also: dict[str, str] = field(default_factory=dict)
    """The message of each further check that shows it."""
    cells: list[str] = field(default_factory=list)
    """Ids, in the order of the report."""
    models: list[str] = field(default_factory=list)
    """Of the cells; a test that is no cell of a matrix stands for itself."""
    noun: str = "model"
    """What :attr:`models` names: ``model``, or ``test``."""
    gates: list[str] = field(default_factory=list)
    """Gates of the run that do not pass because of it."""
    new: bool = False
    """Is it worse than in the baseline?"""

    @property
    def wrong_numbers(self) -> bool:
        """Is it what no list may cut off?"""
        return self.effect.severity == Severity.WRONG_NUMBERS

    @property
    def name(self) -> str:
        """The checks that show it; of cells without a result, what ended them."""
        # What ends a process takes all checks along, also where one alone was asked for.
        ended = self.verdict in ("crash", "timeout")
        if ended or (self.verdict == "error" and len(self.checks) > 1):
            return f"{self.verdict}, so no check has a result"
        return ", ".join(self.checks)

    @property
    def order(self) -> tuple[int, bool, int]:
        """Sorts causes: by severity, then what is new, then by cells."""
        return -self.effect.severity, not self.new, -len(self.cells)

    def further_lines(self) -> Iterator[str]:
        """One line for each other check that shows it or follows from it."""
        for check, message in self.also.items():
            yield textwrap.shorten(f"also {check}: {message}", _ALSO, placeholder=" ...")
        for check in self.consequences:
            yield f"{check} follows from {self.checks[0]}"
        for gate in self.gates:
            yield f"so the gate {gate} does not pass"


@dataclass(frozen=True)
class _Sighting:
    """One problem of one cell that stands for itself."""

    cell: Facts
    verdict: Verdict
    problem: Problem
    effect: Effect
    key: _Key

    @property
    def has_place(self) -> bool:
        return bool(self.problem.place)

    @property
    def blamed(self) -> str:
        """The graph pass that it names."""
        return _blamed_in(self.verdict, self.problem)


def group_causes(cells: Iterable[Facts], verdicts: Iterable[str] = _FAILING, fresh: Fresh | None = None) -> list[Cause]:
    """Group the problems of some cells, and put the groups in order.

    One place in the user's code is one cause. Without a place, problems are one cause if their texts differ in numbers
    only: what a check finds wrong, only within one model, and one backend of the user's own; of values that differ,
    whichever output or gradient it is.
    Problems of one cell that do the same to the model (outputs, gradients and steps that are wrong) are one cause too.
    A graph pass that is named is one cause in all models, and what is wrong beside it in a cell is its doing.
    """
    wanted = frozenset(verdicts)
    by_cell = [_sightings_in(facts, wanted) for facts in cells]
    stands_for = _unite_keys(by_cell)
    causes: dict[_Key, Cause] = {}
    for sightings in by_cell:
        # A pass to blame is what has to be told first of its cause.
        for sighting in sorted(sightings, key=lambda each: not each.blamed):
            # Wrong values beside a problem with a place, or a pass to blame, are of that cause.
            origin = _origin_beside(sighting, sightings) or sighting
            key = stands_for.get(origin.key, origin.key)
            cause = causes.setdefault(key, Cause(sighting.problem, sighting.effect, sighting.verdict.verdict))
            _add_sighting(cause, sighting, fresh or Fresh())
            _add_consequences(cause, sighting, wanted)
    return sorted(causes.values(), key=lambda cause: (*cause.order, not cause.problem.place))


def _sightings_in(facts: Facts, wanted: frozenset[str]) -> list[_Sighting]:
    """The cell's problems that follow from no other; all of them if each follows from another."""
    everything: list[_Sighting] = []
    independent: list[_Sighting] = []
    for verdict in facts.verdicts:
        if verdict.verdict not in wanted:
            continue
        for problem in verdict.problems:
            effect = effect_of(verdict, problem)
            sighting = _Sighting(facts, verdict, problem, effect, _key_of(verdict, problem, effect, facts))
            everything.append(sighting)
            if not root_check(verdict, problem, facts.verdicts):
                independent.append(sighting)
    # Two checks may each follow from the other; then something has to be told all the same.
    return independent or everything


def _unite_keys(by_cell: Sequence[Sequence[_Sighting]]) -> dict[_Key, _Key]:
    """For each key the one that stands for its cause: wrong numbers of one model that come together are one."""
    # A key leads to another one, and so on to the one that stands for all of them.
    stands_for: dict[_Key, _Key] = {}

    def representative(key: _Key) -> _Key:
        while (other := stands_for.get(key, key)) != key:
            key = other
        return key

    for sightings in by_cell:
        first_keys: dict[Effect, _Key] = {}
        for sighting in sightings:
            if sighting.has_place or not _is_of_one_model(sighting.verdict, sighting.problem):
                continue
            # One cell has several faulty passes, and wrong numbers of a model may be of another pass in another cell.
            if sighting.blamed or _origin_beside(sighting, sightings):
                continue
            first_key = first_keys.setdefault(sighting.effect, sighting.key)
            one, other = representative(first_key), representative(sighting.key)
            if one != other:
                stands_for[other] = one
    return {key: representative(key) for key in stands_for}


def _origin_beside(sighting: _Sighting, sightings: Sequence[_Sighting]) -> _Sighting | None:
    """The problem of the same cell that does the same to the model, and has a place or names a pass to blame."""
    if sighting.has_place or sighting.blamed:
        return None
    for other in sightings:
        if other.effect != sighting.effect:
            continue
        if other.blamed or (other.has_place and _is_of_one_model(sighting.verdict, sighting.problem)):
            return other
    return None


def _blamed_in(verdict: Verdict, problem: Problem) -> str:
    return blamed_pass(without_ranks(problem.message)) if verdict.check == "passes" else ""


def _add_sighting(cause: Cause, sighting: _Sighting, fresh: Fresh) -> None:
    facts, check, problem = sighting.cell, sighting.verdict.check, sighting.problem
    if check not in cause.checks:
        if problem.message != cause.problem.message:
            cause.also[check] = problem.message
        cause.checks.append(check)
    # Problems of one cell come one after the other, so to look at the last one is enough.
    if cause.cells[-1:] != [facts.id]:
        cause.cells.append(facts.id)
    if not cause.models and "model" not in facts.axes:
        cause.noun = "test"
    model = facts.axes.get("model", facts.id)
    if model not in cause.models:
        cause.models.append(model)
    place = (facts.id, portable_path(problem.file), problem.line)
    cause.new = cause.new or (facts.id, check) in fresh.checks or place in fresh.places


def _add_consequences(cause: Cause, sighting: _Sighting, wanted: frozenset[str]) -> None:
    """Tell the cause which checks of the cell fail for nothing else."""
    verdicts = sighting.cell.verdicts
    for verdict in verdicts:
        if verdict.verdict not in wanted or verdict.check in (*cause.checks, *cause.consequences):
            continue
        # A cell without a result has the same problem in each check, and none of them follows from another.
        if {problem.message for problem in verdict.problems} == {sighting.problem.message}:
            cause.checks.append(verdict.check)
            continue
        roots = {root_check(verdict, problem, verdicts) for problem in verdict.problems}
        if roots == {sighting.verdict.check}:
            cause.consequences.append(verdict.check)


def _is_of_one_model(verdict: Verdict, problem: Problem) -> bool:
    """Is it told of one model only? An exception or a crash with the same text in two models is one cause."""
    return verdict.verdict in _JUDGED and not without_ranks(problem.message).startswith(RAISED)


def _key_of(verdict: Verdict, problem: Problem, effect: Effect, facts: Facts) -> _Key:
    if problem.place:
        return verdict.verdict, str(effect.severity), problem.place
    if blamed := _blamed_in(verdict, problem):
        return verdict.verdict, str(effect.severity), f"pass {blamed}"
    return verdict.verdict, "", _text_in_common(verdict, problem, facts)


def _text_in_common(verdict: Verdict, problem: Problem, facts: Facts) -> str:
    """What a problem says, without what differs from cell to cell; a crash is one for all checks of a cell."""
    message = without_ranks(problem.message)
    if not _is_of_one_model(verdict, problem):
        return _NUMBER.sub("#", message)
    model = f"{facts.axes.get('model', facts.id)}: {_own_backend(facts)}{verdict.check}: "
    _, colon, rest = _STEP.sub("", message).partition(": ")
    # Checks that compare name the output or gradient first; which of them it is, makes no other cause.
    if verdict.check in COMPARING and colon:
        return model + _REST.sub("", rest)
    return model + _NUMBER.sub("#", message)


def _own_backend(facts: Facts) -> str:
    """The user's own backend (``module:function``): two of them may have a fault each."""
    backend = str(facts.axes.get("backend", ""))
    return f"{backend}: " if ":" in backend else ""


# What a problem means is told from the checks' records and the words of the problem, and is not stored in a report.
# So a report of any version can be put in order.

_OF_VERDICTS: Final = {"crash": severity.CRASHES, "timeout": severity.HANGS, "error": severity.UNJUDGED,
                       "xpass": severity.STALE}
"""What a verdict means whatever the check is. ``fail`` and ``xfail`` are not among them."""
_OF_LIMITS: Final = {"silent_eager": severity.EAGER}
"""Limits that only a policy has; of the others each is one of speed or size."""


def effect_of(verdict: Verdict, problem: Problem) -> Effect:
    """What the problem means for the cell's model."""
    if verdict.verdict in _OF_VERDICTS:
        return _OF_VERDICTS[verdict.verdict]
    way = way_of(verdict.check, problem.message)
    return way.effect if way else check_effect(verdict.check)


def check_effect(check: str) -> Effect:
    """What it means that a check, or a limit of a policy, does not hold.

    Nobody knows how bad a check of another version is: nothing but wrong numbers is told before it.
    """
    if check in CHECKS:
        return CHECKS[check].effect
    if check == TEST_CHECK:
        return severity.FAILS
    if check in METRICS or check in LIMITS or check.endswith("_ratio"):
        return _OF_LIMITS.get(check, severity.TOO_MUCH)
    return Effect(Severity.CRASH, f"fails {check}", f"fail {check}")


def root_check(verdict: Verdict, problem: Problem, verdicts: Sequence[Verdict]) -> str:
    """The check of the same cell from which the problem only follows; empty if it stands for itself.

    ``verdicts``: all of the cell. What ended a cell without a result follows from no check
    (:func:`first_with_problem`).
    """
    if verdict.verdict not in _JUDGED:
        return ""
    way = way_of(verdict.check, problem.message)
    if way is None or way.follows in ("", verdict.check):
        return ""
    # The other check may have been expected to fail (xfail), and then this problem is told by itself.
    fails = any(other.check == way.follows and other.verdict == "fail" for other in verdicts)
    return way.follows if fails else ""


def told_by(verdicts: Sequence[Verdict]) -> dict[str, str]:
    """Check to the one before it whose text tells all of its problems; a check with a cause of its own is not there.

    ``verdicts``: all of one cell, in the order of its checks, so that causes come before what follows from them.
    """
    told: dict[str, str] = {}
    for verdict in verdicts:
        roots: list[str] = []
        for problem in verdict.problems:
            roots.append(root_check(verdict, problem, verdicts) or first_with_problem(verdict, problem, verdicts))
        if roots and all(roots):
            # The root may follow from another one itself.
            told[verdict.check] = told.get(roots[0], roots[0])
    return told


def first_with_problem(verdict: Verdict, problem: Problem, verdicts: Sequence[Verdict]) -> str:
    """The first check of a cell without a result, whose checks all have the same problem; empty for this very one."""
    if verdict.verdict in _JUDGED:
        return ""
    for other in verdicts:
        if other.verdict == verdict.verdict and problem in other.problems:
            return "" if other.check == verdict.check else other.check
    return ""
