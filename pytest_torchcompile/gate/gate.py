"""The gate: may this run be released? A pure function of reports, policy, baseline and day."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pytest_torchcompile import __version__
from pytest_torchcompile.gate import slack
from pytest_torchcompile.gate.allowances import Allowed, allow
from pytest_torchcompile.gate.baseline import Change, another_machine, changes, fresh
from pytest_torchcompile.gate.demands import demands, nothing
from pytest_torchcompile.gate.judged import BAD, JudgedCell, judge_again
from pytest_torchcompile.gate.origin import Asked, origin
from pytest_torchcompile.gate.policy import BASELINE, Policy
from pytest_torchcompile.gate.policy_limits import apply_limits
from pytest_torchcompile.gate.testjudged import demand_tests, judge_tests, whole_tests
from pytest_torchcompile.gate.told import Told
from pytest_torchcompile.gate.wholeness import expected, whole
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.causes import Cause, Fresh, check_effect, group_causes
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.finding import Finding, exit_code
from pytest_torchcompile.report.merging import VARYING, Merged, merge_reports
from pytest_torchcompile.report.reading import Report
from pytest_torchcompile.wrappers.wrapping import wrapper_of

__all__ = ["Outcome", "gate", "judged"]

_OF_WHAT_RAN: Final = frozenset({"skip", "gate", "ran_at_least", "tests", "devices", "pass_rate", "improved",
                                 "baseline"})
"""Findings that say nothing more where nothing ran."""


@dataclass(frozen=True)
class Outcome:
    """What the gate says of a run."""

    findings: tuple[Finding, ...]
    """In the order in which they are told."""
    merged: Merged
    cells: dict[str, JudgedCell]
    policy: Policy
    allowed: Allowed
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
        return [Facts({**self.merged.cells[name], "status": cell.status, "checks": cell.verdicts})
                for name, cell in self.cells.items()]


def gate(reports: Sequence[Report], policy: Policy | None = None, baseline: Sequence[Report] = (),
         today: datetime.date | None = None, asked: Asked | None = None) -> Outcome:
    """Judge the run that the reports are of.

    ``asked``: what the command line asks of the origin of the reports.
    ``baseline``: reports of an earlier run. They add findings and never take any away.
    Raises :class:`~pytest_torchcompile.errors.ReportError` for reports that are not of one run, and
    :class:`~pytest_torchcompile.errors.MatrixError` for a policy that names what the run does not have.
    """
    policy, today = policy or Policy(), today or datetime.date.today()
    merged = merge_reports(reports, VARYING | policy.may_differ)
    if not merged.missing:  # else what is missing may be what the policy names
        policy.hold_against((cell["axes"] for cell in merged.cells.values()), merged.environment,
                            merged.tests)
    cells = judged(merged, policy, today)
    tests = judge_tests(merged, merged.plugin == __version__)
    findings = [*whole(merged, cells, policy), *whole_tests(merged, tests), *expected(merged, policy),
                *origin(merged, policy, asked or Asked())]
    then: dict[str, JudgedCell] | None = None
    tests_then: dict[str, JudgedCell] = {}
    elsewhere = ""
    if baseline:
        before = merge_reports(baseline, VARYING | policy.may_differ)
        findings += [Finding("baseline", "unusable", f"the baseline is partial: {text}") for text in before.problems]
        findings += [Finding("baseline", "unusable", f"the baseline's {report.name} has a seal that is wrong")
                     for report in before.reports if report.seal_broken]
        then = judged(before, Policy(), today)
        tests_then = judge_tests(before, before.plugin == __version__)
        elsewhere = another_machine(merged.environment, before.environment)
    findings += apply_limits(cells.values(), policy, then, elsewhere)
    both = cells | tests
    allowed = allow(list(both.values()), policy, today, whole=not merged.problems)
    found: list[Change] = []
    if then is not None:
        found = changes(cells, then, comparable=not elsewhere)
        found += changes(tests, tests_then, comparable=False, noun="test")
    failing = list(_failing(allowed, both, fresh(found)))
    told = Told(each.cause for each in failing if each.cause is not None)
    demanded = [*demands(merged, cells, policy, allowed.excused, told), *demand_tests(tests, policy)]
    findings = [*failing, *demanded, *findings, *_differences(found, elsewhere, policy, allowed, told),
                *allowed.findings, *slack.findings(policy, cells, allowed.used),
                *_notes(merged, cells, allowed, policy)]
    if not failing and not any(each.holds for each in both.values()):
        findings = [each for each in findings if each.kind not in _OF_WHAT_RAN] + [nothing(merged, cells, tests)]
    findings.sort(key=lambda finding: finding.order)
    return Outcome(tuple(findings), merged, cells, policy, allowed, tests)


def judged(merged: Merged, policy: Policy, today: datetime.date) -> dict[str, JudgedCell]:
    """Every cell of the run, judged from its observation."""
    ours = merged.plugin == __version__
    return {name: judge_again(cell, merged.matrix, policy, today, ours, ours and merged.origin[name] in merged.sealed)
            for name, cell in merged.cells.items()}


def _failing(allowed: Allowed, cells: Mapping[str, JudgedCell], new: Fresh) -> Iterator[Finding]:
    """A finding for each cause."""
    told: set[str] = set()
    facts = [Facts({"id": name, "axes": cells[name].axes, "status": cells[name].status, "checks": bad})
             for name, bad in allowed.failing.items()]
    for cause in group_causes(facts, BAD, new):
        problem = cause.problem
        # A cell without a result has failed no check in particular.
        kind = cause.checks[0] if cause.verdict in ("fail", "xpass") else cause.verdict
        told.update(cause.cells)
        how = "xpass: " if cause.verdict == "xpass" else ""
        yield Finding(kind, "fail", f"{kind}: {how}{problem.message}", tuple(cause.cells), problem.file,
                      int(problem.line), problem.evidence, problem.hint, cause, cause.effect.severity)
    for name, bad in allowed.failing.items():
        if name not in told:
            check, verdict = next((check, found["verdict"]) for check, found in bad.items())
            yield Finding(check, "fail", f"{check}: {verdict} in {name}; the report does not say why", (name,),
                          severity=check_effect(check).severity)


def _differences(found: Iterable[Change], elsewhere: str, policy: Policy, allowed: Allowed,
                 told: Told) -> Iterator[Finding]:
    """What is not as in the baseline. Failures that the policy allows are allowed here too; what a cause tells is new
    there."""
    for change in found:
        affected = change.cells
        if change.kind in ("failures", "graph_breaks", "recompiles"):
            affected = tuple(cell for cell in affected if cell not in allowed.excused)
            if not affected:
                continue
        if told.change(replace(change, cells=affected)):
            continue
        fails = change.kind in BASELINE and \
            policy.baseline.get(change.kind, "fail" if change.sure else "note") == "fail"
        yield Finding("baseline", "fail" if fails else "note", change.text, affected, change.file, change.line,
                      severity=check_effect(change.check).severity if change.check else 0)
    if elsewhere:
        yield Finding("baseline", "note", f"{elsewhere}; times and sizes are not compared")


def _fake_lane(cells: Mapping[str, JudgedCell]) -> Iterator[Finding]:
    """A wrapper that holds among fake ranks only has computed nothing, whatever its checks say."""
    shown = {wrapper_of(cell.axes.get("wrapper")) for cell in cells.values() if cell.holds}
    alone: dict[str, list[str]] = {}
    for name, cell in cells.items():
        if cell.lane == "fake" and (wrapper := wrapper_of(cell.axes.get("wrapper"))) not in shown:
            alone.setdefault(wrapper, []).append(name)
    if alone:
        text = f"{', '.join(alone)}: in the fake lane only, where no number is judged; no cell holds on real ranks"
        yield Finding("lane", "note", text, tuple(name for names in alone.values() for name in names))


def _notes(merged: Merged, cells: Mapping[str, JudgedCell], allowed: Allowed, policy: Policy) -> Iterator[Finding]:
    for note in merged.notes:
        yield Finding("environment", "note", f"the shards ran on machines that differ: {note}")
    yield from _fake_lane(cells)
    if allowed.excused:
        reasons = first_names(dict.fromkeys(allowed.excused.values()))
        text = f"{count(len(allowed.excused), 'cell fails', 'cells fail')} as {policy.path} allows: {reasons}"
        yield Finding("allowed_failures", "note", text, tuple(allowed.excused))
    if allowed.tolerated:
        text = f"{count(len(allowed.tolerated), 'cell fails', 'cells fail')}, as the pass rates of {policy.path} " \
               f"allow: {first_names(allowed.tolerated)}"
        yield Finding("pass_rate", "note", text, tuple(allowed.tolerated))
    changed = [name for name, cell in cells.items() if cell.changed]
    if changed:
        text = f"{count(len(changed), 'cell has', 'cells have')} other verdicts than in the report, because the " \
               f"policy has other limits or an expected failure expired: {first_names(changed)}"
        yield Finding("judged_again", "note", text, tuple(changed))
