"""Limits that only a policy has: numbers of the observation, and multiples of the baseline's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pytest_torchcompile.checks import LIMITS
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.policy import RATIOS, LimitRule, Policy, bounds, owners
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.finding import Finding
from pytest_torchcompile.report.metrics import METRICS, Sections

__all__ = ["apply_limits", "caches", "value", "worst"]

_COMPILING: Final = "compile_seconds"


def apply_limits(cells: Iterable[JudgedCell], policy: Policy,
                 baseline: Mapping[str, JudgedCell] | None, elsewhere: str) -> list[Finding]:
    """Hold each cell that ran against the policy's limits; one that goes over gets a verdict of the limit's name.

    ``elsewhere``: why the baseline's times and sizes can't be compared with these; empty if they can.
    Returns what could not be measured: a limit that is not looked at must not read as one that holds.
    """
    blind: dict[tuple[str, str], list[str]] = {}
    rules: dict[str, LimitRule] = {}
    for cell in cells:
        if cell.skipped is not None or not cell.verdicts:
            continue
        for name, (limit, rule) in policy.limits_of(cell.axes).items():
            rules.setdefault(name, rule)
            if name in LIMITS:
                if cell.verdicts.keys().isdisjoint(owners(name)) and not cell.bad:
                    blind.setdefault((name, f"the check {owners(name)[0]} did not judge them"), []).append(cell.id)
                continue
            found, why = _found(cell, name, baseline, elsewhere)
            if found is not None:
                if _over(name, found, limit):
                    cell.verdicts[name] = _failed(name, found, limit, f"{policy.path}:{policy.line(rule.nodes[name])}")
            elif not cell.bad:  # of a cell that crashed nothing is measured, and it fails anyway
                blind.setdefault((name, why), []).append(cell.id)
    return list(_unmeasured(blind, rules, policy))


def value(sections: Sections, name: str) -> float | None:
    """The metric of a cell; None if it was not measured, or by a version with other sections."""
    try:
        return METRICS[name].read(sections)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        return None


def worst(ranks: Iterable[Sections], name: str) -> float | None:
    """The metric of the rank that is worst in it; None if no rank measured it."""
    found = [number for sections in ranks if (number := value(sections, name)) is not None]
    return (min if METRICS[name].kind == "min" else max)(found, default=None)


def caches(ranks: Iterable[Sections]) -> frozenset[str]:
    """What the compile caches answered (``hit``, ``miss``, ...): compile times with and without hits are two things."""
    try:
        return frozenset(answer.rpartition(" ")[2] for sections in ranks for each in sections["compiles"]["compiles"]
                         for answer in each.get("caches", ()))
    except (KeyError, TypeError, AttributeError):
        return frozenset()


def _found(cell: JudgedCell, name: str, baseline: Mapping[str, JudgedCell] | None,
           elsewhere: str) -> tuple[float | None, str]:
    """The number that the limit bounds, or why there is none."""
    metric = RATIOS.get(name, name)
    found = worst(cell.ranks, metric)
    if found is None:
        return None, f"no check of this matrix measures {metric}"
    if name not in RATIOS:
        return found, ""
    if baseline is None:
        return None, "it needs --baseline"
    if elsewhere:
        return None, elsewhere
    before = baseline.get(cell.id)
    then = worst(before.ranks, metric) if before is not None else None
    if before is None or then is None:
        return None, "the baseline does not have them"
    if metric == _COMPILING and caches(before.ranks) != caches(cell.ranks):
        return None, "the compile caches answered otherwise in the baseline"
    return (found / then if then else (1.0 if found == then else float("inf"))), ""


def _over(name: str, found: float, limit: float) -> bool:
    return found < limit if bounds(name) == "min" else found > limit


def _failed(name: str, found: float, limit: float, where: str) -> dict[str, Any]:
    metric = METRICS[RATIOS.get(name, name)]
    unit = metric.unit if name in METRICS else " times the baseline's"
    wanted = "at least" if bounds(name) == "min" else "at most"
    message = f"{metric.help}: {found:.4g}{unit}, {wanted} {limit:g}{unit} allowed (limit {name} of {where})"
    problem = {"message": message, "evidence": "", "hint": "", "file": "", "line": 0}
    return {"verdict": "fail", "problems": [problem]}


def _unmeasured(blind: Mapping[tuple[str, str], Sequence[str]], rules: Mapping[str, LimitRule],
                policy: Policy) -> Iterator[Finding]:
    for (name, why), cells in blind.items():
        line = policy.line(rules[name].nodes.get(name))
        yield Finding("unmeasured", "unusable",
                      f"the limit {name} of {policy.path}:{line} can't be judged for "
                      f"{count(len(cells), 'cell')}: {why}",
                      tuple(cells), file=policy.path, line=line)
