"""From an observation to verdicts: each check judges, then the cell's xfail rule is applied. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from pytest_torchcompile import checks
from pytest_torchcompile.observation import Failure, Judgement, Observation, Problem

if TYPE_CHECKING:
    from pytest_torchcompile.matrix import PlannedCell

__all__ = ["apply_xfail", "judge"]

_OF_FAILURE = {"skip": "skip", "crash": "crash", "timeout": "timeout"}
_HINTS = {
    "crash": "run the cell in pytest's own process under a debugger: --compile-inprocess",
    "timeout": "raise --compile-timeout if the cell is just slow",
    "user": "mend the model or its inputs first: eager must work",
    "internal": "this is a mistake of pytest-torchcompile: please report it with the evidence",
}


def judge(observation: Observation, names: Iterable[str], limits: Mapping[str, float]) -> dict[str, Judgement]:
    """What each of the named checks says of the observation."""
    if failure := observation.failure:
        return dict.fromkeys(names, _failed(failure))
    vacuous = tuple(_vacuous(observation))
    return {name: _judge(observation, name, limits, vacuous) for name in names}


def _judge(observation: Observation, name: str, limits: Mapping[str, float],
           vacuous: tuple[Problem, ...]) -> Judgement:
    section = observation.sections.get(name)
    if section is None:
        return Judgement("error", (Problem(f"the observation has no section {name!r}: it was not measured"),))
    problems = tuple(checks.load(name).judge(section, limits)) or vacuous
    return Judgement("fail" if problems else "pass", problems)


def _vacuous(observation: Observation) -> Iterator[Problem]:
    """No check passes a cell in which no compiled code ran, whichever checks were asked for."""
    compiles = observation.sections.get("compiles", {})
    if not any(graph["runs"] for graph in compiles.get("graphs", ())):
        yield Problem("nothing to judge: no compiled code ran", hint="see the check `compiles` of this cell")


def _failed(failure: Failure) -> Judgement:
    verdict = _OF_FAILURE.get(failure.kind, "error")
    if verdict == "skip":
        return Judgement("skip", note=failure.message)
    return Judgement(verdict, (Problem(failure.message, failure.evidence, _HINTS.get(failure.kind, "")),))


def apply_xfail(judgements: Mapping[str, Judgement], planned: PlannedCell,
                complete: bool = True) -> dict[str, Judgement]:
    """Turn expected failures into ``xfail``, and an expected failure that did not come into ``xpass``.

    A rule for some checks is strict for each of them. A rule for the whole cell expects at least one of its
    checks to fail; the others may pass. An ``error`` (the matrix, the model or we are wrong, so that nothing is
    known of the compiler) is never expected. ``complete`` says that all checks of the cell were judged: only
    then can it be told that none of them failed.
    """
    if planned.outcome != "xfail" or any(j.verdict == "skip" for j in judgements.values()):
        return dict(judgements)
    expected = [n for n in judgements if not planned.checks or n in planned.checks]
    # A crash says nothing of the one check that was expected to fail.
    expectable = ("fail",) if planned.checks else ("fail", "crash", "timeout")
    failed = [n for n in expected if judgements[n].verdict in expectable]
    if any(judgements[n].verdict not in ("pass", *expectable) for n in expected):
        return dict(judgements)
    reason = planned.reason + (f" ({planned.issue})" if planned.issue else "")
    unexpected = Problem(
        f"passed, although {planned.rule} expects it to fail: {reason}",
        hint="the cause is gone: remove the rule, or the check from it",
    )
    strict = bool(planned.checks) or (complete and not failed)
    result = dict(judgements)
    for name in expected:
        if name in failed:
            result[name] = Judgement("xfail", judgements[name].problems, reason)
        elif strict:
            result[name] = Judgement("xpass", (unexpected,))
    return result
