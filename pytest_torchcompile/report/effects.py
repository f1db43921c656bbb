"""Effects: what a problem of a report means for its model, how bad that is, and of which other problem it only comes.

Told from the checks' records (:mod:`pytest_torchcompile.checks`) and the words of the problem, so that a report of any
version can be put in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pytest_torchcompile.checks import CHECKS, LIMITS, severity, way_of
from pytest_torchcompile.checks.severity import Effect, Severity
from pytest_torchcompile.report.facts import Problem, Verdict
from pytest_torchcompile.report.metrics import METRICS
from pytest_torchcompile.report.testrecord import TEST_CHECK

__all__ = ["check_effect", "effect_of", "follows", "told_by"]

_OF_VERDICTS: Final = {"crash": severity.CRASHES, "timeout": severity.HANGS, "error": severity.UNJUDGED,
                       "xpass": severity.STALE}
"""What a verdict means whatever the check is. ``fail`` and ``xfail`` are not among them."""
_JUDGED: Final = ("fail", "xfail")
"""Verdicts on a result; any other is the same at each check of the cell."""
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


def follows(verdict: Verdict, problem: Problem, verdicts: Sequence[Verdict]) -> str:
    """The check of the same cell from which the problem only follows; empty if it stands for itself.

    ``verdicts``: all of the cell. What ended a cell without a result follows from no check (:func:`told_by`).
    """
    if verdict.verdict not in _JUDGED:
        return ""
    way = way_of(verdict.check, problem.message)
    if way is None or way.follows in ("", verdict.check):
        return ""
    fails = any(other.check == way.follows and other.verdict == "fail" for other in verdicts)
    return way.follows if fails else ""


def told_by(verdict: Verdict, problem: Problem, verdicts: Sequence[Verdict]) -> str:
    """The first check of a cell without a result, whose checks all have the same problem; empty for this very one."""
    if verdict.verdict in _JUDGED:
        return ""
    same = (other.check for other in verdicts if other.verdict == verdict.verdict and problem in other.problems)
    first = next(same, verdict.check)
    return "" if first == verdict.check else first
