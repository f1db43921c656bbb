"""From an observation to verdicts: each check judges, then the cell's xfail rule is applied. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_torchcompile import checks
from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.observation import NO_RANK, Failure, Judgement, Observation, Problem
from pytest_torchcompile.oracle.proof import compiled_code_ran
from pytest_torchcompile.quantity import numbered
from pytest_torchcompile.run.timeout_text import timeout_problem

if TYPE_CHECKING:
    from pytest_torchcompile.plan.matrix import PlannedCell
    from pytest_torchcompile.plan.rules import Rule

__all__ = ["apply_xfail", "expired_hint", "judge_observation", "with_hint"]

_VERDICT_OF_FAILURE = {"skip": "skip", "crash": "crash", "timeout": "timeout"}
_HINTS = {
    "crash": "run the cell in pytest's own process under a debugger: --compile-inprocess",
    "crash of ranks": "TORCH_LOGS=+dynamo TORCH_LOGS_OUT=torch.log in the environment tells how far each rank came",
    "user": "mend the model or its inputs first: eager must work",
    "user in loss": "mend the loss function first: eager must work",
    NO_RANK: "see that python -c 'import torch' works here, and that memory and disk suffice",
    "internal": "this is a mistake of pytest-torchcompile: please report it with the evidence",
}


def judge_observation(observation: Observation, names: Iterable[str],
                      limits: Mapping[str, float]) -> dict[str, Judgement]:
    """What each of the named checks says of the observation."""
    failure = observation.failure
    if failure and failure.kind != "aborted":
        return dict.fromkeys(names, _judge_failure(failure, several=bool(observation.ranks)))
    return {name: _judge_check(observation, name, limits) for name in names}


def _judge_check(observation: Observation, name: str, limits: Mapping[str, float]) -> Judgement:
    problems_of_ranks: dict[int, tuple[Problem, ...]] = {}
    sections_of_ranks = _sections_of_ranks(observation, name)
    for rank, sections in enumerate(sections_of_ranks):
        if sections is None:
            continue
        section = sections.get(name)
        if section is None:
            return Judgement("error", (Problem(f"the observation has no section {name!r}: it was not measured"),))
        problems = tuple(checks.load(name).judge(section, limits)) or _vacuous_problems(name, sections)
        if problems:
            problems_of_ranks[rank] = problems
    if problems_of_ranks:
        return Judgement("fail", _merge_problems(problems_of_ranks, len(sections_of_ranks)))
    # Somebody has ended this rank: what the others show is not all that happened.
    if None in sections_of_ranks:
        return Judgement("error", (Problem("a rank was ended with the others, and no rank says why"),))
    return Judgement("pass", note=checks.load(name).remark(observation.sections[name]))


def _sections_of_ranks(observation: Observation, name: str) -> list[Mapping[str, Any] | None]:
    """The sections of each rank that the check judges; None for a rank that another one took along."""
    # A check of several ranks judges once: the observation's own sections hold those of all ranks.
    if CHECKS[name].ranks == "several":
        return [observation.sections]
    sections_of_ranks: list[Mapping[str, Any] | None] = [None if observation.failure else observation.sections]
    for rank in observation.ranks:
        sections_of_ranks.append(None if rank["failure"] else rank["sections"])
    return sections_of_ranks


def _merge_problems(problems_of_ranks: Mapping[int, tuple[Problem, ...]], ranks: int) -> tuple[Problem, ...]:
    """The problems of all ranks, each with the ranks that have it; one that several have is told once."""
    if ranks == 1:
        return problems_of_ranks.get(0, ())
    ranks_of: dict[tuple[str, str, int], list[int]] = {}
    first: dict[tuple[str, str, int], Problem] = {}
    for rank, problems in problems_of_ranks.items():
        for problem in problems:
            # Without the evidence: it has the rank's own addresses and times.
            key = (problem.message, problem.file, problem.line)
            ranks_of.setdefault(key, []).append(rank)
            first.setdefault(key, problem)
    merged = []
    for key, problem in first.items():
        who = "every rank" if len(ranks_of[key]) == ranks else numbered("rank", ranks_of[key])
        merged.append(replace(problem, message=f"{who}: {problem.message}"))
    return tuple(merged)


def _vacuous_problems(name: str, sections: Mapping[str, Any]) -> tuple[Problem, ...]:
    """No check passes a rank in which no compiled code ran, whichever checks were asked for; nor equality of zeros."""
    if not compiled_code_ran(sections):
        return (Problem("nothing to judge: no compiled code ran", hint="see the check `compiles` of this cell"),)
    all_zero = sections.get("compiles", {}).get("all_zero")
    if name == "equivalence" and all_zero and all(all_zero):
        return (Problem("nothing to judge: every output is zero, NaN or infinite, whose equality proves nothing",
                        hint="give the model inputs and weights that reach its outputs"),)
    return ()


def _judge_failure(failure: Failure, several: bool) -> Judgement:
    # Any other kind says nothing of the compiler: the matrix, the model or this package is wrong.
    verdict = _VERDICT_OF_FAILURE.get(failure.kind, "error")
    if verdict == "skip":
        return Judgement("skip", note=failure.message)
    kind = failure.kind
    if several and kind == "crash":
        kind = "crash of ranks"
    elif kind == "user" and failure.phase == "loss":
        kind = "user in loss"
    if kind == "timeout":
        return Judgement(verdict, (timeout_problem(failure.message, failure.evidence),))
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
    if planned.expired is not None:
        return _name_expired_rule(judgements, planned.expired)
    verdicts = {judgement.verdict for judgement in judgements.values()}
    if planned.outcome != "xfail" or "skip" in verdicts:
        return dict(judgements)
    expected = [name for name in judgements if not planned.checks or name in planned.checks]
    # A crash says nothing of the one check that was expected to fail.
    expectable = ("fail",) if planned.checks else ("fail", "crash", "timeout")
    if any(judgements[name].verdict not in ("pass", *expectable) for name in expected):
        return dict(judgements)
    failed = [name for name in expected if judgements[name].verdict in expectable]
    wrong = []
    if not planned.checks:
        wrong = [name for name in failed if _is_wrong(name, judgements[name])]
    reason = planned.reason
    if planned.issue:
        reason = f"{reason} ({planned.issue})"
    unexpected = Problem(
        f"passed, although {planned.rule} expects it to fail: {reason}",
        hint="the cause is gone: remove the rule, or the check from it",
    )
    # A rule for the whole cell is kept by any check that fails.
    strict = bool(planned.checks) or (complete and not failed)
    result = dict(judgements)
    for name in expected:
        if name in wrong:
            result[name] = _not_hidden(judgements[name], planned.rule, wrong)
        elif name in failed:
            result[name] = Judgement("xfail", judgements[name].problems, _reason_told(reason, judgements[name]))
        elif strict:
            result[name] = Judgement("xpass", (unexpected,))
    return result


def _reason_told(reason: str, judgement: Judgement) -> str:
    """The reason of the rule; with what came instead where no check could judge, which may have another cause."""
    if judgement.verdict == "fail" or not judgement.problems:
        return reason
    return f"{reason}; this time {judgement.verdict}: {judgement.problems[0].message}"


def _name_expired_rule(judgements: Mapping[str, Judgement], rule: Rule) -> dict[str, Judgement]:
    hint = expired_hint(str(rule.until), rule.where, rule.reason)
    result = dict(judgements)
    for name in rule.checks or judgements:
        if name in judgements:
            result[name] = with_hint(judgements[name], hint)
    return result


def _is_wrong(name: str, judgement: Judgement) -> bool:
    messages = [problem.message for problem in judgement.problems]
    return checks.fails_by_wrong_numbers(name, judgement.verdict, messages)


def _not_hidden(judgement: Judgement, rule: str, wrong: list[str]) -> Judgement:
    """A failure that an xfail without checks does not hide, and what to write if it is known."""
    return with_hint(judgement, f"the xfail of {rule} names no checks, so it hides no wrong numbers; if these are "
                                f"known, give it `checks: [{', '.join(wrong)}]`")


def expired_hint(until: str, rule: str, reason: str) -> str:
    """What is said of a failure that was expected until a day that is over."""
    return f"it was expected to fail until {until} ({rule}: {reason}); that day is over"


def with_hint(judgement: Judgement, hint: str) -> Judgement:
    """The judgement, each problem of which has one more hint."""
    problems = []
    for problem in judgement.problems:
        hints = [problem.hint, hint] if problem.hint else [hint]
        problems.append(replace(problem, hint="; ".join(hints)))
    return replace(judgement, problems=tuple(problems))
