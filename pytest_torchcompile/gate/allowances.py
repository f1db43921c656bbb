"""Allowances: which failures and skips a policy lets pass, and which of its entries are no longer needed."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_torchcompile.checks import computes_wrong_numbers
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.policy import AllowedFailure, PassRate, Policy
from pytest_torchcompile.gate.skips import skips
from pytest_torchcompile.plan.axes import value_key
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.finding import Finding, Weight
from pytest_torchcompile.report.testrecord import TEST_LANE

__all__ = ["Allowed", "allow", "untold"]

_TOLD: Final = frozenset({"pass", "xfail", "xpass", "fail"})
"""Verdicts that tell whether a cell fails as an entry allows; one that was skipped or crashed tells nothing."""


@dataclass
class Allowed:
    """What is left when the policy has let pass what it lets pass."""

    failing: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Cell to the checks that fail and are not allowed to."""
    excused: dict[str, str] = field(default_factory=dict)
    """Cell to the reason for which its failures are allowed."""
    tolerated: list[str] = field(default_factory=list)
    """Cells that fail within a pass rate."""
    findings: list[Finding] = field(default_factory=list)
    used: Counter[int] = field(default_factory=Counter)
    """Number of an entry of ``allowed_failures`` to the cells that need it."""
    unneeded: list[int] = field(default_factory=list)
    """Entries of ``allowed_failures`` that no cell needs any more, each of its cells having been judged."""


def allow(cells: Sequence[JudgedCell], policy: Policy, today: datetime.date, whole: bool = True) -> Allowed:
    """Apply ``allowed_failures``, ``pass_rate`` and ``allowed_skips``.

    ``whole``: is no cell missing? Else it can't be told that an entry is no longer needed.
    """
    allowed = Allowed()
    for cell in cells:
        bad = cell.bad
        for name, check in bad.items():
            number = next((k for k, entry in enumerate(policy.allowed_failures)
                           if today <= entry.until and _covers(entry, cell, name, check)), None)
            if number is None:
                allowed.failing.setdefault(cell.id, {})[name] = check
            else:
                allowed.used[number] += 1 if cell.id not in allowed.excused else 0
                allowed.excused[cell.id] = str(policy.allowed_failures[number])
    _entries(allowed, cells, policy, today, whole)
    _pass_rates(allowed, cells, policy)
    tests = [cell for cell in cells if cell.lane == TEST_LANE]
    allowed.findings += skips([cell for cell in cells if cell.lane != TEST_LANE], policy)
    allowed.findings += skips(tests, policy, "test")
    return allowed


def _covers(entry: AllowedFailure, cell: JudgedCell, name: str, check: Mapping[str, Any]) -> bool:
    if not entry.checks and _has_wrong_numbers(name, check):
        return False
    return _would_cover(entry, cell, name, check)


def _would_cover(entry: AllowedFailure, cell: JudgedCell, name: str, check: Mapping[str, Any]) -> bool:
    return (entry.cells.covers(cell)
            and (not entry.checks or name in entry.checks)
            and check["verdict"] in entry.verdicts
            and (not entry.contains or any(entry.contains in f"{p['message']}\n{p['evidence']}"
                                           for p in check["problems"])))


def _has_wrong_numbers(name: str, check: Mapping[str, Any]) -> bool:
    """Does the check say that the model computes something else? No entry hides that without naming the check."""
    return check["verdict"] == "fail" and any(computes_wrong_numbers(name, problem["message"])
                                              for problem in check["problems"])


def _unhidden(number: int, cells: Sequence[JudgedCell], policy: Policy) -> Finding | None:
    """Wrong numbers that an entry without ``checks`` would hide, with what to write if they are known."""
    entry = policy.allowed_failures[number]
    names: dict[str, None] = {}
    wrong_cells = []
    for cell in cells:
        wrong = [name for name, check in cell.bad.items()
                 if not entry.checks and _has_wrong_numbers(name, check) and _would_cover(entry, cell, name, check)]
        if wrong:
            wrong_cells.append(cell.id)
            names.update(dict.fromkeys(wrong))
    if not wrong_cells:
        return None
    line = policy.line(entry.cells.node)
    text = f"the allowed failure of {policy.path}:{line} names no checks, so it hides no wrong numbers"
    hint = f"if these are known, give it `checks: [{', '.join(names)}]`"
    return Finding("allowed_failures", "note", text, tuple(wrong_cells), hint=hint, file=policy.path, line=line)


def _entries(allowed: Allowed, cells: Sequence[JudgedCell], policy: Policy, today: datetime.date,
             whole: bool) -> None:
    """Entries that are over, too wide, or no longer needed."""
    for number, entry in enumerate(policy.allowed_failures):
        place: dict[str, Any] = {"file": policy.path, "line": policy.line(entry.cells.node)}
        where = f"{policy.path}:{place['line']}"
        used = allowed.used[number]
        unhidden = _unhidden(number, cells, policy)
        if unhidden and today <= entry.until:
            allowed.findings.append(unhidden)
        if today > entry.until:
            would = [c.id for c in cells if any(_covers(entry, c, name, check) for name, check in c.bad.items())]
            text = f"the allowed failure of {where} expired on {entry.until}: {entry.reason} ({entry.issue})"
            weight: Weight = "fail" if would else "note"
            hint = "mend it, or give it a new day" if would else "nothing fails so any more: take the entry out"
            allowed.findings.append(Finding("expired", weight, text, tuple(would), hint=hint, **place))
        elif entry.at_most is not None and used > entry.at_most:
            noun = "test" if entry.cells.tests else "cell"
            text = f"{count(used, f'{noun} fails', f'{noun}s fail')} as {where} allows for {entry.at_most}: {entry}"
            allowed.findings.append(Finding("allowed_failures", "fail", text, **place))
        elif unhidden:
            continue  # what it was written for may be these very numbers, so it can't be called unneeded
        elif not used and whole and (unknown := untold(entry, cells)):
            text = (f"whether {where} is still needed can't be told: {first_names(unknown)} "
                    f"{'was' if len(unknown) == 1 else 'were'} not judged")
            allowed.findings.append(Finding("allowed_failures", "note", text, tuple(unknown), **place))
        elif not used and whole:
            allowed.unneeded.append(number)
            text = f"improved: nothing fails any more as {where} allows: {entry}"
            hint = "take the entry out, or have --update-policy do it"
            allowed.findings.append(Finding("improved", "fail", text, hint=hint, **place))


def untold(entry: AllowedFailure, cells: Iterable[JudgedCell]) -> list[str]:
    """Cells in which a failure that the entry allows could not show, as a check of theirs was not judged."""
    def silent(cell: JudgedCell) -> set[str]:
        odd = {name for name, check in cell.verdicts.items() if check["verdict"] not in _TOLD}
        return {name for name in odd.union(cell.missing) if not entry.checks or name in entry.checks}

    return [cell.id for cell in cells if entry.cells.covers(cell) and silent(cell)]


def _pass_rates(allowed: Allowed, cells: Sequence[JudgedCell], policy: Policy) -> None:
    """Let fail what lies within the pass rates that cover it, all of which must hold; but never wrong numbers."""
    ran = [cell for cell in cells if cell.verdicts and cell.skipped is None and cell.lane != TEST_LANE]
    holds: dict[str, bool] = {}
    for rate in policy.pass_rates:
        for name, group in _groups(rate, ran):
            failing = [cell.id for cell in group if cell.id in allowed.failing]
            good = 1 - len(failing) / len(group)
            fulfilled = good >= rate.rate - 1e-12
            if not fulfilled:
                allowed.findings.append(Finding(
                    "pass_rate", "fail", f"{good:.1%} of the {count(len(group), 'cell')}{name} are good, "
                    f"{rate.rate:.1%} wanted",
                    tuple(failing), file=policy.path, line=policy.line(rate.node)))
            for cell in group:
                holds[cell.id] = holds.get(cell.id, True) and fulfilled
    wrong = {cell_id for cell_id, failing in allowed.failing.items()
             if any(_has_wrong_numbers(name, check) for name, check in failing.items())}
    allowed.tolerated = [name for name in allowed.failing if holds.get(name) and name not in wrong]
    for name in allowed.tolerated:
        del allowed.failing[name]


def _groups(rate: PassRate, ran: Sequence[JudgedCell]) -> Iterator[tuple[str, list[JudgedCell]]]:
    """Cells of the fake lane, which can't fail by a number, are counted by themselves."""
    for lane in (False, True):
        here, where = [cell for cell in ran if (cell.lane == "fake") is lane], " of the fake lane" if lane else ""
        if not rate.axis:
            yield from [(where, here)] if here else ()
            continue
        groups: dict[Any, list[JudgedCell]] = {}
        for cell in here:
            if rate.axis in cell.axes and (rate.only is None or rate.only.matches(cell.axes)):
                groups.setdefault(value_key(cell.axes[rate.axis]), []).append(cell)
        for (_, value), group in groups.items():
            yield f"{where} with {rate.axis} = {value}", group
