"""The gate: may this run be released? A pure function of reports, policy, baseline and day."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from pytest_torchcompile import __version__
from pytest_torchcompile.gate.allowances import Allowances, apply_allowances
from pytest_torchcompile.gate.baseline import Change, another_machine, find_changes, fresh_places
from pytest_torchcompile.gate.judged import BAD, JudgedCell, judge_again
from pytest_torchcompile.gate.origin import OriginRequest, check_origin
from pytest_torchcompile.gate.permitted import permitted_findings
from pytest_torchcompile.gate.policy import BASELINE, Policy
from pytest_torchcompile.gate.policy_limits import apply_limits, slack_findings
from pytest_torchcompile.gate.testjudged import check_tests, demand_tests, judge_tests
from pytest_torchcompile.gate.wholeness import (
    ExplainedFailures,
    check_demands,
    check_expectations,
    check_wholeness,
    nothing_to_judge,
)
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.causes import Cause, Fresh, check_effect, group_causes
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.finding import Finding, Weight, exit_code
from pytest_torchcompile.report.merging import VARYING, Merged, merge_reports
from pytest_torchcompile.report.reading import Report
from pytest_torchcompile.wrappers.wrapping import wrapper_of

__all__ = ["GateOutcome", "gate", "judge_cells"]

_OF_WHAT_RAN: Final = frozenset({"skip", "gate", "ran_at_least", "tests", "devices", "pass_rate", "improved",
                                 "baseline"})
"""Findings that say nothing more where nothing ran."""


@dataclass(frozen=True)
class GateOutcome:
    """What the gate says of a run."""

    findings: tuple[Finding, ...]
    """In the order in which they are told."""
    merged: Merged
    cells: dict[str, JudgedCell]
    policy: Policy
    allowed: Allowances
    tests: dict[str, JudgedCell] = field(default_factory=dict)
    """Tests that use our fixtures, by node id."""

    @property
    def code(self) -> int:
        """The exit code."""
        return exit_code(self.findings)

    @property
    def causes(self) -> list[Cause]:
        """Why cells fail that may not, the worst first."""
        return [finding.cause for finding in self.findings if finding.cause is not None]

    @property
    def facts(self) -> list[Facts]:
        """The cells of the report, with the verdicts that hold here."""
        facts = []
        for name, cell in self.cells.items():
            facts.append(Facts({**self.merged.cells[name], "status": cell.status, "checks": cell.verdicts}))
        return facts


@dataclass(frozen=True)
class BaselineRun:
    """The earlier run that this one is compared with, judged; without one its parts are empty."""

    findings: tuple[Finding, ...] = ()
    """Why it is no good baseline."""
    cells: dict[str, JudgedCell] | None = None
    """None: there is no baseline."""
    tests: dict[str, JudgedCell] = field(default_factory=dict)
    elsewhere: str = ""
    """Why times and sizes can't be compared; empty if they can."""


def gate(reports: Sequence[Report], policy: Policy | None = None, baseline: Sequence[Report] = (),
         today: datetime.date | None = None, request: OriginRequest | None = None) -> GateOutcome:
    """Judge the run that the reports are of.

    ``baseline``: reports of an earlier run. They add findings and never take any away.
    ``request``: what the command line asks of the origin of the reports.
    Raises :class:`~pytest_torchcompile.errors.ReportError` for reports that are not of one run, and
    :class:`~pytest_torchcompile.errors.MatrixError` for a policy that names what the run does not have.
    """
    policy, today, request = policy or Policy(), today or datetime.date.today(), request or OriginRequest()
    merged = merge_reports(reports, VARYING | policy.may_differ)
    # Where cells are missing, what the policy names may be among them.
    if not merged.missing:
        axes = (cell["axes"] for cell in merged.cells.values())
        policy.hold_against(axes, merged.environment, merged.tests)

    cells = judge_cells(merged, policy, today)
    tests = judge_tests(merged, merged.plugin == __version__)
    of_run = [*check_wholeness(merged, cells, policy), *check_tests(merged, tests),
              *check_expectations(merged, policy), *check_origin(merged, policy, request)]
    before = _judge_baseline(baseline, merged, policy, today)
    # Limits give verdicts, so they come before everything that looks at verdicts.
    of_limits = apply_limits(cells.values(), policy, before.cells, before.elsewhere)
    both = cells | tests
    allowed = apply_allowances(list(both.values()), policy, today, whole=not merged.problems)
    changed = _changes_to_baseline(before, cells, tests)

    failing = list(_failing_causes(allowed, both, fresh_places(changed)))
    explained = ExplainedFailures(each.cause for each in failing if each.cause is not None)
    # This also notes at a cause which gates it keeps from passing.
    of_demands = [*check_demands(merged, cells, policy, allowed.excused, explained), *demand_tests(tests, policy)]
    of_baseline = list(_baseline_findings(changed, before.elsewhere, policy, allowed, explained))
    # Sorting is stable: within one weight and severity findings stay in this order.
    findings = [
        *failing, *of_demands, *of_run, *before.findings, *of_limits, *of_baseline, *allowed.findings,
        *slack_findings(policy, cells, allowed.used), *_notes(merged, cells, allowed, policy),
        *permitted_findings(merged.cells.values(), cells),
    ]
    if not failing and not any(each.holds for each in both.values()):
        findings = [each for each in findings if each.kind not in _OF_WHAT_RAN]
        findings.append(nothing_to_judge(merged, cells, tests))
    findings.sort(key=lambda finding: finding.order)
    return GateOutcome(tuple(findings), merged, cells, policy, allowed, tests)


def judge_cells(merged: Merged, policy: Policy, today: datetime.date) -> dict[str, JudgedCell]:
    """Every cell of the run, judged from its observation."""
    ours = merged.plugin == __version__
    judged = {}
    for name, cell in merged.cells.items():
        sealed = ours and merged.origin[name] in merged.sealed
        judged[name] = judge_again(cell, merged.matrix, policy, today, ours, sealed)
    return judged


def _judge_baseline(baseline: Sequence[Report], merged: Merged, policy: Policy, today: datetime.date) -> BaselineRun:
    if not baseline:
        return BaselineRun()
    # What may differ between shards may differ between those of the baseline too.
    before = merge_reports(baseline, VARYING | policy.may_differ)
    reasons = [f"the baseline is partial: {text}" for text in before.problems]
    for report in before.reports:
        if report.seal_broken:
            reasons.append(f"the baseline's {report.name} has a seal that is wrong")
    return BaselineRun(tuple(Finding("baseline", "unusable", text) for text in reasons),
                       judge_cells(before, Policy(), today), judge_tests(before, before.plugin == __version__),
                       another_machine(merged.environment, before.environment))


def _changes_to_baseline(before: BaselineRun, cells: Mapping[str, JudgedCell],
                         tests: Mapping[str, JudgedCell]) -> list[Change]:
    if before.cells is None:
        return []
    return [*find_changes(cells, before.cells, comparable=not before.elsewhere),
            *find_changes(tests, before.tests, comparable=False, noun="test")]


def _failing_causes(allowed: Allowances, cells: Mapping[str, JudgedCell], new: Fresh) -> Iterator[Finding]:
    """A finding for each cause."""
    facts = []
    for name, bad in allowed.failing.items():
        facts.append(Facts({"id": name, "axes": cells[name].axes, "status": cells[name].status, "checks": bad}))
    explained: set[str] = set()
    for cause in group_causes(facts, BAD, new):
        explained.update(cause.cells)
        yield _finding_of_cause(cause)
    # A check may fail without a problem; that must not pass unsaid.
    for name, bad in allowed.failing.items():
        if name not in explained:
            check, stored = next(iter(bad.items()))
            text = f"{check}: {stored['verdict']} in {name}; the report does not say why"
            yield Finding(check, "fail", text, (name,), severity=check_effect(check).severity)


def _finding_of_cause(cause: Cause) -> Finding:
    problem = cause.problem
    kind = cause.verdict
    # A cell without a result has failed no check in particular.
    if cause.verdict in ("fail", "xpass"):
        kind = cause.checks[0]
    text = f"{kind}: {problem.message}"
    if cause.verdict == "xpass":
        text = f"{kind}: xpass: {problem.message}"
    return Finding(kind, "fail", text, tuple(cause.cells), problem.file, int(problem.line), problem.evidence,
                   problem.hint, cause, cause.effect.severity)


def _baseline_findings(changed: Sequence[Change], elsewhere: str, policy: Policy, allowed: Allowances,
                       explained: ExplainedFailures) -> Iterator[Finding]:
    """What is not as in the baseline. Failures that the policy allows are allowed here too; what a cause tells is new
    there."""
    for change in changed:
        affected = change.cells
        if change.kind in ("failures", "graph_breaks", "recompiles"):
            # What is known to fail may get worse without a word; the allowance has a last day.
            affected = tuple(cell for cell in affected if cell not in allowed.excused)
            if not affected:
                continue
        if explained.explain_change(change, affected):
            continue
        severity = 0
        if change.check:
            severity = check_effect(change.check).severity
        yield Finding("baseline", _weight_of_change(change, policy), change.text, affected, change.file, change.line,
                      severity=severity)
    if elsewhere:
        yield Finding("baseline", "note", f"{elsewhere}; times and sizes are not compared")


def _weight_of_change(change: Change, policy: Policy) -> Weight:
    # What improved or is new is told, and never fails.
    if change.kind not in BASELINE:
        return "note"
    wanted = policy.baseline.get(change.kind)
    if wanted == "fail" or (wanted is None and change.sure):
        return "fail"
    return "note"


def _fake_lane_note(cells: Mapping[str, JudgedCell]) -> Iterator[Finding]:
    """A wrapper that holds among fake ranks only has computed nothing, whatever its checks say."""
    # One cell that holds on real ranks is enough for its wrapper.
    shown = {wrapper_of(cell.axes.get("wrapper")) for cell in cells.values() if cell.holds}
    fake_only: dict[str, list[str]] = {}
    for name, cell in cells.items():
        if cell.lane != "fake":
            continue
        wrapper = wrapper_of(cell.axes.get("wrapper"))
        if wrapper not in shown:
            fake_only.setdefault(wrapper, []).append(name)
    if fake_only:
        text = f"{', '.join(fake_only)}: in the fake lane only, where no number is judged; no cell holds on real ranks"
        yield Finding("lane", "note", text, tuple(chain.from_iterable(fake_only.values())))


def _notes(merged: Merged, cells: Mapping[str, JudgedCell], allowed: Allowances, policy: Policy) -> Iterator[Finding]:
    for note in merged.notes:
        yield Finding("environment", "note", f"the shards ran on machines that differ: {note}")
    yield from _fake_lane_note(cells)
    if allowed.excused:
        reasons = first_names(dict.fromkeys(allowed.excused.values()))
        text = f"{count(len(allowed.excused), 'cell fails', 'cells fail')} as {policy.path} allows: {reasons}"
        yield Finding("allowed_failures", "note", text, tuple(allowed.excused))
    if allowed.tolerated:
        text = f"{count(len(allowed.tolerated), 'cell fails', 'cells fail')}, as the pass rates of {policy.path} " \
               f"allow: {first_names(allowed.tolerated)}"
        yield Finding("pass_rate", "note", text, tuple(allowed.tolerated))
    changed = [name for name, cell in cells.items() if cell.changed]
    # The report is not wrong: it was judged by other limits, or before a day that is over.
    if changed:
        text = f"{count(len(changed), 'cell has', 'cells have')} other verdicts than in the report, because the " \
               f"policy has other limits or an expected failure expired: {first_names(changed)}"
        yield Finding("judged_again", "note", text, tuple(changed))
