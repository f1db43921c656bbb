"""From an observation to verdicts: each check judges, then the cell's xfail rule is applied. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_torchcompile import checks
from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.observation import NO_RANK, Failure, Judgement, Observation, Problem
from pytest_torchcompile.quantity import numbered

if TYPE_CHECKING:
    from pytest_torchcompile.plan.matrix import PlannedCell

__all__ = ["apply_xfail", "expired_hint", "judge_observation", "with_hint"]

_OF_FAILURE = {"skip": "skip", "crash": "crash", "timeout": "timeout"}
_HINTS = {
    "crash": "run the cell in pytest's own process under a debugger: --compile-inprocess",
    "crash of ranks": "TORCH_LOGS=+dynamo TORCH_LOGS_OUT=torch.log in the environment tells how far each rank came",
    "timeout": "raise --compile-timeout if the cell is just slow",
    "user": "mend the model or its inputs first: eager must work",
    NO_RANK: "see that python -c 'import torch' works here, and that memory and disk suffice",
    "internal": "this is a mistake of pytest-torchcompile: please report it with the evidence",
}


def judge_observation(observation: Observation, names: Iterable[str],
                      limits: Mapping[str, float]) -> dict[str, Judgement]:
    """What each of the named checks says of the observation."""
    failure = observation.failure
    if failure and failure.kind != "aborted":
        return dict.fromkeys(names, _failed(failure, several=bool(observation.ranks)))
    return {name: _judge(observation, name, limits) for name in names}


def _judge(observation: Observation, name: str, limits: Mapping[str, float]) -> Judgement:
    found: dict[int, tuple[Problem, ...]] = {}
    judged = _sections(observation, name)
    for rank, sections in enumerate(judged):
        if sections is None:
            continue
        if (section := sections.get(name)) is None:
            return Judgement("error", (Problem(f"the observation has no section {name!r}: it was not measured"),))
        if problems := tuple(checks.load(name).judge(section, limits)) or _vacuous(name, sections):
            found[rank] = problems
    if not found and any(sections is None for sections in judged):
        return Judgement("error", (Problem("a rank was ended with the others, and no rank says why"),))
    if not found:
        return Judgement("pass", note=checks.load(name).remark(observation.sections[name]))
    return Judgement("fail", _of_ranks(found, len(judged)))


def _sections(observation: Observation, name: str) -> list[Mapping[str, Any] | None]:
    """The sections of each rank that the check judges; None for a rank that another one took along."""
    if CHECKS[name].ranks == "several":
        return [observation.sections]  # they hold those of all ranks
    ranks = [(observation.failure, observation.sections), *((r["failure"], r["sections"]) for r in observation.ranks)]
    return [None if failure else sections for failure, sections in ranks]


def _of_ranks(found: Mapping[int, tuple[Problem, ...]], ranks: int) -> tuple[Problem, ...]:
    """The problems of all ranks, each with the ranks that have it; one that several have is told once."""
    if ranks == 1:
        return found.get(0, ())
    whose: dict[tuple[str, str, int], list[int]] = {}
    first: dict[tuple[str, str, int], Problem] = {}
    for rank, problems in found.items():
        for problem in problems:
            key = (problem.message, problem.file, problem.line)
            whose.setdefault(key, []).append(rank)
            first.setdefault(key, problem)
    return tuple(replace(problem, message=f"{_who(whose[key], ranks)}: {problem.message}")
                 for key, problem in first.items())


def _who(some: list[int], ranks: int) -> str:
    if len(some) == ranks:
        return "every rank"
    return numbered("rank", some)


def _vacuous(name: str, sections: Mapping[str, Any]) -> tuple[Problem, ...]:
    """No check passes a rank in which no compiled code ran, whichever checks were asked for; nor equality of zeros."""
    compiles = sections.get("compiles", {})
    if not any(graph["runs"] for graph in compiles.get("graphs", ())):
        return (Problem("nothing to judge: no compiled code ran", hint="see the check `compiles` of this cell"),)
    if name == "equivalence" and (zero := compiles.get("all_zero")) and all(zero):
        return (Problem("nothing to judge: every output is zero, NaN or infinite, whose equality proves nothing",
                        hint="give the model inputs and weights that reach its outputs"),)
    return ()


def _failed(failure: Failure, several: bool) -> Judgement:
    verdict = _OF_FAILURE.get(failure.kind, "error")
    if verdict == "skip":
        return Judgement("skip", note=failure.message)
    kind = "crash of ranks" if several and failure.kind == "crash" else failure.kind
    return Judgement(verdict, (Problem(failure.message, failure.evidence, _HINTS.get(kind, "")),))


def apply_xfail(judgements: Mapping[str, Judgement], planned: PlannedCell,
                complete: bool = True) -> dict[str, Judgement]:
    """Turn expected failures into ``xfail``, and an expected failure that did not come into ``xpass``.

    A rule for some checks is strict for each of them. A rule for the whole cell expects at least one of its
    checks to fail; the others may pass. It never expects wrong numbers, which only a rule that names the check
    does. A rule whose day is over expects nothing any more, and is named at the failure.

    An ``error`` (the matrix, the model or we are wrong, so that nothing is
    known of the compiler) is never expected. ``complete`` says that all checks of the cell were judged: only
    then can it be told that none of them failed.
    """
    if (over := planned.expired) is not None:
        told = expired_hint(str(over.until), over.where, over.reason)
        return {name: with_hint(each, told) if not over.checks or name in over.checks else each
                for name, each in judgements.items()}
    if planned.outcome != "xfail" or any(j.verdict == "skip" for j in judgements.values()):
        return dict(judgements)
    expected = [n for n in judgements if not planned.checks or n in planned.checks]
    # A crash says nothing of the one check that was expected to fail.
    expectable = ("fail",) if planned.checks else ("fail", "crash", "timeout")
    failed = [n for n in expected if judgements[n].verdict in expectable]
    wrong = [n for n in failed if not planned.checks and _is_wrong(n, judgements[n])]
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
        if name in wrong:
            result[name] = _unhidden(judgements[name], planned.rule, wrong)
        elif name in failed:
            result[name] = Judgement("xfail", judgements[name].problems, reason)
        elif strict:
            result[name] = Judgement("xpass", (unexpected,))
    return result


def _is_wrong(name: str, judgement: Judgement) -> bool:
    return judgement.verdict == "fail" and any(checks.computes_wrong_numbers(name, problem.message)
                                               for problem in judgement.problems)


def _unhidden(judgement: Judgement, rule: str, wrong: list[str]) -> Judgement:
    """A failure that an xfail without checks does not hide, and what to write if it is known."""
    return with_hint(judgement, f"the xfail of {rule} names no checks, so it hides no wrong numbers; if these are "
                                f"known, give it `checks: [{', '.join(wrong)}]`")


def expired_hint(until: str, rule: str, reason: str) -> str:
    """What is said of a failure that was expected until a day that is over."""
    return f"it was expected to fail until {until} ({rule}: {reason}); that day is over"


def with_hint(judgement: Judgement, hint: str) -> Judgement:
    """The judgement, each problem of which has one more hint."""
    problems = [replace(problem, hint=f"{problem.hint}; {hint}" if problem.hint else hint)
                for problem in judgement.problems]
    return replace(judgement, problems=tuple(problems))
