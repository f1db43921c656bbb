"""Limits that only a policy has, which are held against each cell; and limits that could be stricter (slack)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from pytest_torchcompile.checks import LIMITS
from pytest_torchcompile.gate.allowances import unjudged_cells
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.policy import RATIOS, LimitRule, Policy, bound_kind, judging_checks
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.finding import Finding, Weight
from pytest_torchcompile.report.metrics import METRICS, Sections

__all__ = ["Slack", "apply_limits", "cache_answers", "slack_findings", "slack_numbers", "worst_rank"]

_COMPILING: Final = "compile_seconds"


@dataclass(frozen=True)
class Measured:
    """A number that a limit bound_kind, or why there is none."""

    number: float | None
    why_not: str = ""


@dataclass(frozen=True)
class Slack:
    """A number of the policy that could be stricter."""

    name: str
    old: float
    new: int
    node: yaml.Node
    """Where the number stands."""

    @property
    def text(self) -> str:
        """``recompiles: 3 -> 1``."""
        return f"{self.name}: {self.old:g} -> {self.new}"


def apply_limits(cells: Iterable[JudgedCell], policy: Policy,
                 baseline: Mapping[str, JudgedCell] | None, elsewhere: str) -> list[Finding]:
    """Hold each cell that ran against the policy's limits; one that goes over gets a verdict of the limit's name.

    ``elsewhere``: why the baseline's times and sizes can't be compared with these; empty if they can.
    Returns what could not be measured: a limit that is not looked at must not read as one that holds.
    """
    unmeasured: dict[tuple[str, str], list[str]] = {}
    rules: dict[str, LimitRule] = {}
    for cell in cells:
        if cell.skipped is not None or not cell.verdicts:
            continue
        for name, (limit, rule) in policy.limits_of(cell.axes).items():
            rules.setdefault(name, rule)
            why = _why_no_check_judged(cell, name)
            # Limits of the matrix are the checks' own affair: they were judged again with the policy's numbers.
            if name not in LIMITS:
                measured = _measure_limit(cell, name, baseline, elsewhere)
                why = measured.why_not
                if measured.number is not None and _goes_over(name, measured.number, limit):
                    where = f"{policy.path}:{policy.line(rule.nodes[name])}"
                    cell.verdicts[name] = _failed_check(name, measured.number, limit, where)
            # Of a cell that crashed nothing is measured, and it fails anyway.
            if why and not cell.bad:
                unmeasured.setdefault((name, why), []).append(cell.id)
    return list(_unmeasured_findings(unmeasured, rules, policy))


def _why_no_check_judged(cell: JudgedCell, name: str) -> str:
    """Why a limit of the matrix was not looked at in the cell; empty if it was, or if the limit is none of these."""
    if name not in LIMITS or not cell.verdicts.keys().isdisjoint(judging_checks(name)):
        return ""
    return f"the check {judging_checks(name)[0]} did not judge them"


def worst_rank(ranks: Iterable[Sections], name: str) -> float | None:
    """The metric of the rank that is worst in it; None if no rank measured it."""
    # Ranks of one cell differ in times and sizes; the slowest one is what a user waits for.
    measured = [_read_metric(sections, name) for sections in ranks]
    numbers = [number for number in measured if number is not None]
    if METRICS[name].kind == "min":
        return min(numbers, default=None)
    return max(numbers, default=None)


def _read_metric(sections: Sections, name: str) -> float | None:
    """The metric of a cell; None if it was not measured, or by a version with other sections."""
    try:
        return METRICS[name].read(sections)
    # The reader indexes a section as today's version writes it, so any of these means one thing: another form.
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        return None


def cache_answers(ranks: Iterable[Sections]) -> frozenset[str]:
    """What the compile caches answered (``hit``, ``miss``, ...): compile times with and without hits are two things."""
    answers: set[str] = set()
    try:
        for sections in ranks:
            for compiled in sections["compiles"]["compiles"]:
                # `fx hit`: which cache, and what it answered.
                answers.update(answer.rpartition(" ")[2] for answer in compiled.get("caches", ()))
    except (KeyError, TypeError, AttributeError):
        return frozenset()
    return frozenset(answers)


def _measure_limit(cell: JudgedCell, name: str, baseline: Mapping[str, JudgedCell] | None,
                   elsewhere: str) -> Measured:
    """The number that the limit bounds."""
    metric = RATIOS.get(name, name)
    now = worst_rank(cell.ranks, metric)
    if now is None:
        return Measured(None, f"no check of this matrix measures {metric}")
    if name not in RATIOS:
        return Measured(now)
    if baseline is None:
        return Measured(None, "it needs --baseline")
    if elsewhere:
        return Measured(None, elsewhere)
    before = baseline.get(cell.id)
    if before is None:
        return Measured(None, "the baseline does not have them")
    then = worst_rank(before.ranks, metric)
    if then is None:
        return Measured(None, "the baseline does not have them")
    # A compile that was read from a cache is faster than any that was not.
    if metric == _COMPILING and cache_answers(before.ranks) != cache_answers(cell.ranks):
        return Measured(None, "the compile caches answered otherwise in the baseline")
    return Measured(_ratio(now, then))


def _ratio(now: float, then: float) -> float:
    if then:
        return now / then
    if now == then:
        return 1.0
    return float("inf")


def _goes_over(name: str, number: float, limit: float) -> bool:
    if bound_kind(name) == "min":
        return number < limit
    return number > limit


def _failed_check(name: str, number: float, limit: float, where: str) -> dict[str, Any]:
    """A verdict in the form of a check's."""
    metric = METRICS[RATIOS.get(name, name)]
    unit = " times the baseline's"
    if name in METRICS:
        unit = metric.unit
    wanted = {"min": "at least", "max": "at most"}[bound_kind(name)]
    message = f"{metric.help}: {number:.4g}{unit}, {wanted} {limit:g}{unit} allowed (limit {name} of {where})"
    problem = {"message": message, "evidence": "", "hint": "", "file": "", "line": 0}
    return {"verdict": "fail", "problems": [problem]}


def _unmeasured_findings(unmeasured: Mapping[tuple[str, str], list[str]], rules: Mapping[str, LimitRule],
                         policy: Policy) -> Iterator[Finding]:
    for (name, why), cells in unmeasured.items():
        # The first rule of that limit stands for all of them.
        line = policy.line(rules[name].nodes.get(name))
        text = f"the limit {name} of {policy.path}:{line} can't be judged for {count(len(cells), 'cell')}: {why}"
        yield Finding("unmeasured", "unusable", text, tuple(cells), file=policy.path, line=line)


def slack_numbers(policy: Policy, cells: Mapping[str, JudgedCell], used: Counter[int]) -> Iterator[Slack]:
    """Limits on counts that are higher than the largest count of their cells, and ``at_most`` of allowed failures.

    ``used``: number of an allowed failure to the cells that need it.
    """
    for rule in policy.limits:
        for name, limit in rule.limits.items():
            # Only counts: a time that is lower today may be higher tomorrow.
            if name in METRICS and METRICS[name].whole and METRICS[name].kind == "max":
                largest = _largest_count(policy, rule, name, cells)
                if largest is not None and largest < limit:
                    yield Slack(name, limit, largest, rule.nodes[name])
    for number, entry in enumerate(policy.allowed_failures):
        if entry.at_most is None or entry.at_most_node is None:
            continue
        if 0 < used[number] < entry.at_most and not unjudged_cells(entry, cells.values()):
            yield Slack("at_most", entry.at_most, used[number], entry.at_most_node)


def _largest_count(policy: Policy, rule: LimitRule, name: str, cells: Mapping[str, JudgedCell]) -> int | None:
    """Of the cells in which this rule has the last word; None where one of them has not run compiled code."""
    counts = []
    for cell in cells.values():
        _, last = policy.limits_of(cell.axes).get(name, (0.0, None))
        if last is not rule:
            continue
        # Its count is 0 for the wrong reason, and would tighten the limit for all others.
        if not cell.compiled:
            return None
        counted = worst_rank(cell.ranks, name)
        if counted is not None:
            counts.append(int(counted))
    return max(counts, default=None)


def slack_findings(policy: Policy, cells: Mapping[str, JudgedCell], used: Counter[int]) -> Iterator[Finding]:
    """A finding for each: a failure where the policy has ``ratchet: true``, else a note."""
    # Without `ratchet` slack is no fault, but somebody may want to take it over.
    weight: Weight = "note"
    if policy.ratchet:
        weight = "fail"
    for slack in slack_numbers(policy, cells, used):
        line = policy.line(slack.node)
        yield Finding("improved", weight, f"improved: {policy.path}:{line}: {slack.text}",
                      file=policy.path, line=line, hint="take it over by --update-policy")
