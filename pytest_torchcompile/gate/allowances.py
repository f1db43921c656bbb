"""Allowances: which failures and skips a policy lets pass, and which of its entries are no longer needed.

A skipped cell proves nothing, so a policy must allow it, and the gate says in which words.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

from pytest_torchcompile.checks import fails_by_wrong_numbers
from pytest_torchcompile.checks.severity import NUMBERS_OF_TESTS, TEST_CHECK
from pytest_torchcompile.gate.judged import JudgedCell, ids_of
from pytest_torchcompile.gate.policy import AllowedFailure, PassRate, Policy
from pytest_torchcompile.plan.axes import value_key
from pytest_torchcompile.plan.nodes import scalar_text
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.finding import Finding
from pytest_torchcompile.report.schema import TEST_LANE

__all__ = ["Allowances", "apply_allowances", "skip_findings", "unjudged_cells"]

_DECIDED: Final = frozenset({"pass", "xfail", "xpass", "fail"})
"""Verdicts that tell whether a cell fails as an entry allows; one that was skipped or crashed tells nothing."""


@dataclass
class Allowances:
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


def apply_allowances(cells: Sequence[JudgedCell], policy: Policy, today: datetime.date,
                     whole: bool = True) -> Allowances:
    """Apply ``allowed_failures``, ``pass_rate`` and ``allowed_skips``.

    ``whole``: is no cell missing? Else it can't be told that an entry is no longer needed.
    """
    allowed = Allowances()
    for cell in cells:
        for name, check in cell.bad.items():
            _excuse_check(allowed, cell, name, check, policy, today)
    for number, entry in enumerate(policy.allowed_failures):
        if today > entry.until:
            allowed.findings.append(_finding_of_expired(entry, cells, policy))
        else:
            allowed.findings += _findings_of_entry(allowed, number, entry, cells, policy, whole)
    _apply_pass_rates(allowed, cells, policy)
    # Apart, because the entry that would allow a skip is written in other words for each.
    tests = [cell for cell in cells if cell.lane == TEST_LANE]
    real_cells = [cell for cell in cells if cell.lane != TEST_LANE]
    allowed.findings += skip_findings(real_cells, policy)
    allowed.findings += skip_findings(tests, policy, "test")
    return allowed


def _excuse_check(allowed: Allowances, cell: JudgedCell, name: str, check: dict[str, Any], policy: Policy,
                  today: datetime.date) -> None:
    """By the first entry that covers it; without one it is failing."""
    for number, entry in enumerate(policy.allowed_failures):
        if today <= entry.until and _covers_failure(entry, cell, name, check):
            if cell.id not in allowed.excused:
                allowed.used[number] += 1
            allowed.excused[cell.id] = str(entry)
            return
    allowed.failing.setdefault(cell.id, {})[name] = check


def _covers_failure(entry: AllowedFailure, cell: JudgedCell, name: str, check: Mapping[str, Any]) -> bool:
    if not entry.checks and _has_wrong_numbers(name, check):
        return False
    return _matches_failure(entry, cell, name, check)


def _has_wrong_numbers(name: str, check: Mapping[str, Any]) -> bool:
    messages = [problem["message"] for problem in check["problems"]]
    return fails_by_wrong_numbers(name, check["verdict"], messages)


def _name_in_entries(name: str, check: Mapping[str, Any]) -> str:
    """What an entry's ``checks`` calls it. A test has no checks; wrong numbers in it go by the name of the check that
    judges a cell's."""
    if name == TEST_CHECK and _has_wrong_numbers(name, check):
        return NUMBERS_OF_TESTS
    return name


def _matches_failure(entry: AllowedFailure, cell: JudgedCell, name: str, check: Mapping[str, Any]) -> bool:
    if not entry.cells.covers(cell) or check["verdict"] not in entry.verdicts:
        return False
    if entry.checks and _name_in_entries(name, check) not in entry.checks:
        return False
    if not entry.contains:
        return True
    return any(entry.contains in f"{problem['message']}\n{problem['evidence']}" for problem in check["problems"])


def _findings_of_entry(allowed: Allowances, number: int, entry: AllowedFailure, cells: Sequence[JudgedCell],
                       policy: Policy, whole: bool) -> Iterator[Finding]:
    """Is the entry too wide, or no longer needed?"""
    line = policy.line(entry.cells.node)
    where = f"{policy.path}:{line}"
    used = allowed.used[number]
    wrong = _wrong_numbers_not_hidden(entry, cells)
    if wrong.cells:
        text = f"the allowed failure of {where} names no checks, so it hides no wrong numbers"
        hint = f"if these are known, give it `checks: [{', '.join(wrong.checks)}]`"
        yield Finding("allowed_failures", "note", text, tuple(wrong.cells), hint=hint, file=policy.path, line=line)
    if entry.at_most is not None and used > entry.at_most:
        noun = "cell"
        if entry.cells.tests:
            noun = "test"
        text = f"{count(used, f'{noun} fails', f'{noun}s fail')} as {where} allows for {entry.at_most}: {entry}"
        yield Finding("allowed_failures", "fail", text, file=policy.path, line=line)
        return
    # What it was written for may be these very numbers, so it can't be called unneeded.
    if wrong.cells or used or not whole:
        return
    unknown = unjudged_cells(entry, cells)
    if unknown:
        text = f"whether {where} is still needed can't be told: {first_names(unknown)} {_was_or_were(len(unknown))} " \
               "not judged"
        yield Finding("allowed_failures", "note", text, tuple(unknown), file=policy.path, line=line)
        return
    allowed.unneeded.append(number)
    text = f"improved: nothing fails any more as {where} allows: {entry}"
    yield Finding("improved", "fail", text, hint="take the entry out, or have --update-policy do it",
                  file=policy.path, line=line)


@dataclass
class WrongNumbers:
    """Failures that an entry without ``checks`` would hide if they told of anything but wrong numbers."""

    cells: list[str] = field(default_factory=list)
    checks: dict[str, None] = field(default_factory=dict)
    """What to name in the entry if they are known."""


def _wrong_numbers_not_hidden(entry: AllowedFailure, cells: Sequence[JudgedCell]) -> WrongNumbers:
    wrong = WrongNumbers()
    # An entry that names its checks says so on purpose, wrong numbers included.
    if entry.checks:
        return wrong
    for cell in cells:
        checks = []
        for name, check in cell.bad.items():
            if _has_wrong_numbers(name, check) and _matches_failure(entry, cell, name, check):
                checks.append(_name_in_entries(name, check))
        if checks:
            wrong.cells.append(cell.id)
            wrong.checks.update(dict.fromkeys(checks))
    return wrong


def _finding_of_expired(entry: AllowedFailure, cells: Sequence[JudgedCell], policy: Policy) -> Finding:
    file, line = policy.path, policy.line(entry.cells.node)
    text = f"the allowed failure of {file}:{line} expired on {entry.until}: {entry.reason} ({entry.issue})"
    covered = []
    for cell in cells:
        # Judged as if the entry were not over.
        if any(_covers_failure(entry, cell, name, check) for name, check in cell.bad.items()):
            covered.append(cell.id)
    if covered:
        return Finding("expired", "fail", text, tuple(covered), file, line, hint="mend it, or give it a new day")
    return Finding("expired", "note", text, (), file, line, hint="nothing fails so any more: take the entry out")


def unjudged_cells(entry: AllowedFailure, cells: Iterable[JudgedCell]) -> list[str]:
    """Cells in which a failure that the entry allows could not show, as a check of theirs was not judged."""
    return [cell.id for cell in cells if entry.cells.covers(cell) and _has_undecided_check(entry, cell)]


def _has_undecided_check(entry: AllowedFailure, cell: JudgedCell) -> bool:
    undecided = set(cell.missing)
    for name, check in cell.verdicts.items():
        if check["verdict"] not in _DECIDED:
            undecided.add(name)
    # A test that was not judged might have failed by anything.
    if entry.checks and cell.lane != TEST_LANE:
        undecided.intersection_update(entry.checks)
    return bool(undecided)


# pass rates


def _apply_pass_rates(allowed: Allowances, cells: Sequence[JudgedCell], policy: Policy) -> None:
    """Let fail what lies within the pass rates that cover it, all of which must hold; but never wrong numbers."""
    # What did not run is no cell of a rate: skips and missing cells have findings of their own.
    ran = [cell for cell in cells if cell.verdicts and cell.skipped is None and cell.lane != TEST_LANE]
    covered: set[str] = set()
    not_tolerable: set[str] = set()
    for rate in policy.pass_rates:
        for name, group in _rate_groups(rate, ran):
            failing = [cell.id for cell in group if cell.id in allowed.failing]
            good = 1 - len(failing) / len(group)
            # 1 - 1/10 is not 0.9 to the last bit.
            if good < rate.rate - 1e-12:
                text = f"{good:.1%} of the {count(len(group), 'cell')}{name} are good, {rate.rate:.1%} wanted"
                allowed.findings.append(Finding("pass_rate", "fail", text, tuple(failing), file=policy.path,
                                                line=policy.line(rate.node)))
                not_tolerable.update(ids_of(group))
            covered.update(failing)
    for name, failing_checks in allowed.failing.items():
        if any(_has_wrong_numbers(check, found) for check, found in failing_checks.items()):
            not_tolerable.add(name)
    allowed.tolerated = [name for name in allowed.failing if name in covered and name not in not_tolerable]
    # From here on they count as known failures, not as failing.
    for name in allowed.tolerated:
        del allowed.failing[name]


def _rate_groups(rate: PassRate, ran: Sequence[JudgedCell]) -> Iterator[tuple[str, list[JudgedCell]]]:
    """Cells of the fake lane, which can't fail by a number, are counted by themselves."""
    real = [cell for cell in ran if cell.lane != "fake"]
    fake = [cell for cell in ran if cell.lane == "fake"]
    for name, cells in (("", real), (" of the fake lane", fake)):
        if rate.axis:
            for value, group in _cells_by_value(rate, cells):
                yield f"{name} with {rate.axis} = {value}", group
        elif cells:
            yield name, cells


def _cells_by_value(rate: PassRate, cells: Sequence[JudgedCell]) -> Iterator[tuple[Any, list[JudgedCell]]]:
    groups: dict[Any, list[JudgedCell]] = {}
    for cell in cells:
        if rate.axis in cell.axes and (rate.only is None or rate.only.matches(cell.axes)):
            groups.setdefault(value_key(cell.axes[rate.axis]), []).append(cell)
    for (_, value), group in groups.items():
        yield value, group


# skips


def skip_findings(cells: Sequence[JudgedCell], policy: Policy, noun: str = "cell") -> Iterator[Finding]:
    """A finding for each reason of skips that no entry of the policy allows, with the entry that would.

    ``noun``: what is skipped, ``cell`` or ``test``.
    """
    by_reason: dict[str, list[JudgedCell]] = {}
    allowed = 0
    for cell in cells:
        reason = cell.skipped
        if reason is None:
            continue
        # The words count too: the same cell skipped for a new reason has to be looked at anew.
        if any(entry.cells.covers(cell) and entry.contains in reason for entry in policy.allowed_skips):
            allowed += 1
        else:
            by_reason.setdefault(reason, []).append(cell)
    if allowed:
        text = f"{count(allowed, f'skipped {noun} is', f'skipped {noun}s are')} allowed by {policy.path}"
        yield Finding("skip", "note", text)
    for reason, group in by_reason.items():
        text = f"{len(group)} of {count(len(cells), noun)} " \
               f"{_was_or_were(len(group))} skipped, and no policy allows it"
        if reason:
            text += f": {reason}"
        yield Finding("skip", "fail", text, ids_of(group), hint=_entry_to_write(reason, group, cells, policy))


def _was_or_were(number: int) -> str:
    if number == 1:
        return "was"
    return "were"


def _entry_to_write(reason: str, group: Sequence[JudgedCell], cells: Sequence[JudgedCell], policy: Policy) -> str:
    """The policy's lines that would allow these skips."""
    if group[0].lane == TEST_LANE:
        selector = f"tests: {_yaml_list(ids_of(group))}"
    else:
        chosen = _shortest_selector(group, cells)
        axes = ", ".join(f"{axis}: {_yaml_list(values)}" for axis, values in chosen.items())
        selector = f"cells: {{{axes}}}"
    # Written as YAML, since the lines are there to be copied.
    why = scalar_text(reason or "why it may be skipped")
    entry = f"allowed_skips:\n  - {selector}\n    reason: {why}"
    if policy.path:
        return f"if that is meant, write to {policy.path}:\n\n{entry}"
    return f"if that is meant, write to a file, and give it by --policy:\n\nversion: 1\n{entry}"


def _shortest_selector(group: Sequence[JudgedCell], cells: Sequence[JudgedCell]) -> dict[str, list[Any]]:
    """The fewest axes whose values tell these cells from all others; all axes, if three do not."""
    values: dict[str, list[Any]] = {}
    keys: dict[str, set[Any]] = {}
    for axis in group[0].axes:
        if all(axis in cell.axes for cell in group):
            distinct = {value_key(cell.axes[axis]): cell.axes[axis] for cell in group}
            values[axis], keys[axis] = list(distinct.values()), set(distinct)
    wanted = set(ids_of(group))
    # Of many axes the combinations of four are too many to try, and nobody would read them.
    for size in (1, 2, 3):
        for axes in combinations(values, size):
            if wanted.issuperset(ids_of(cell for cell in cells if _has_values(cell, axes, keys))):
                return {axis: values[axis] for axis in axes}
    return values


def _has_values(cell: JudgedCell, axes: Iterable[str], keys: Mapping[str, set[Any]]) -> bool:
    return all(axis in cell.axes and value_key(cell.axes[axis]) in keys[axis] for axis in axes)


def _yaml_list(values: Sequence[Any]) -> str:
    quoted = list(map(scalar_text, values))
    if len(quoted) == 1:
        return quoted[0]
    return f"[{', '.join(quoted)}]"
