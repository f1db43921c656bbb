"""The gate's verdict as text: first the one sentence that a release manager needs, then what is behind it.

And what ``--compile-baseline`` prints at the end of a run: how it differs from an earlier report.
"""

from __future__ import annotations

import datetime
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.checks.severity import WRONG
from pytest_torchcompile.errors import ReportError
from pytest_torchcompile.gate.baseline import Change, another_machine, find_changes, fresh_places
from pytest_torchcompile.gate.gate import GateOutcome, judge_cells
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.policy import BASELINE, Policy
from pytest_torchcompile.gate.testjudged import judge_tests
from pytest_torchcompile.observation import VERDICTS
from pytest_torchcompile.quantity import count, first_names, listed_counts
from pytest_torchcompile.report.causes import Fresh
from pytest_torchcompile.report.finding import Finding, foremost_findings, headline, shorten_to_headline
from pytest_torchcompile.report.merging import Merged, merge_reports
from pytest_torchcompile.report.reading import Report
from pytest_torchcompile.report.safe_output import harmless_text

__all__ = [
    "WORDS", "BaselineSummary", "announcement", "command_again", "compare_with_baseline", "judged_facts",
    "outcome_record", "refusal", "refusal_record", "run_facts", "sentence", "shown_place", "verdict_counts",
]

WORDS: Final = {0: "PASS", 1: "FAIL", 2: "UNUSABLE", 3: "NOTHING TO JUDGE"}
# For a terminal; what is more is counted, and stands in the report.
SHOWN: Final = 20
EVIDENCE: Final = 12
CELLS: Final = 3
_INDENT: Final = " " * 10


def sentence(outcome: GateOutcome) -> str:
    """What somebody who reads nothing else should know, in at most 25 words."""
    return harmless_text(_raw_sentence(outcome))


def _raw_sentence(outcome: GateOutcome) -> str:
    code = outcome.code
    if code == 0:
        return shorten_to_headline(f"PASS: {_what_is_good(outcome)}")
    decisive = [finding for finding in outcome.findings if finding.weight != "note"]
    # What fails has a sentence of its own, which names the models.
    if decisive[0].cause is not None:
        without_cause = [finding for finding in decisive if finding.cause is None]
        return headline(outcome.causes, f"{WORDS[code]}: ", len(without_cause))
    text = f"{WORDS[code]}: {decisive[0].text}"
    if len(decisive) == 1:
        return shorten_to_headline(text)
    # The first finding is shorten_to_headline by as many words as the rest of the sentence needs.
    more = f"; and {count(len(decisive) - 1, 'more finding')}"
    return f"{shorten_to_headline(text, len(more.split()))}{more}"


def refusal(error: Exception, code: int) -> str:
    """The sentence for reports that could not be read or merged."""
    return harmless_text(f"{WORDS[code]}: {error}")


def announcement(outcome: GateOutcome) -> Iterator[str]:
    """The lines: the sentence, the findings, the facts."""
    yield sentence(outcome)
    yield ""
    shown = foremost_findings(outcome.findings, SHOWN)
    for finding in shown:
        yield from map(harmless_text, _lines_of_finding(outcome, finding))
    if len(outcome.findings) > len(shown):
        yield f"... and {len(outcome.findings) - len(shown)} more findings"
    if outcome.findings:
        yield ""
    yield harmless_text(run_facts(outcome))


def outcome_record(outcome: GateOutcome) -> dict[str, Any]:
    """The same for programs: plain data, with every finding and all cells of each (docs/gating.md has the form)."""
    findings = []
    for finding in outcome.findings:
        findings.append({
            "weight": finding.weight, "kind": finding.kind, "severity": finding.severity, "text": finding.text,
            "new": finding.new, "file": finding.file, "line": finding.line, "evidence": finding.evidence,
            "more": finding.lines, "hint": finding.hint, "cells": list(finding.cells),
            "again": command_again(outcome, finding),
        })
    judged = (*outcome.cells.values(), *outcome.tests.values())
    return {
        "exit_code": outcome.code, "verdict": WORDS[outcome.code], "sentence": sentence(outcome),
        "matrix": outcome.merged.matrix["path"], "git": outcome.merged.git, "environment": outcome.merged.environment,
        "verdicts": {each.id: each.status for each in judged}, "findings": findings,
    }


def refusal_record(text: str, code: int) -> dict[str, Any]:
    """The keys that every answer has, of reports that could not be judged."""
    return {"exit_code": code, "verdict": WORDS[code], "sentence": text, "findings": []}


def run_facts(outcome: GateOutcome) -> str:
    """What was judged: versions, devices, counts."""
    environment = outcome.merged.environment
    devices = ", ".join(dict.fromkeys(map(str, environment.get("devices") or ()))) or "no device told"
    where = f"{outcome.merged.matrix['path']} on torch {environment.get('torch', '(not told)')}".lstrip()
    text = f"{where}, {devices}: {judged_facts(outcome)}"
    git = outcome.merged.git
    if git:
        # As many letters as git itself shows of large repositories.
        text += f"; commit {git['commit'][:12]}"
        if git["changed"]:
            text += " with changes"
    return text


def judged_facts(outcome: GateOutcome) -> str:
    """What was judged, with counts."""
    judged = []
    # A run of tests alone has no matrix, so that "0 cells" would say nothing.
    if outcome.cells or not outcome.tests:
        judged.append(_facts_of_cells(list(outcome.cells.values())))
    if outcome.tests:
        tests = outcome.tests.values()
        judged.append(f"{count(len(tests), 'test')}: {verdict_counts(tests)}; {_number_compiled(tests)} ran compiled "
                      "code")
    if len(outcome.merged.reports) > 1:
        judged.append(f"{len(outcome.merged.reports)} shards")
    return "; ".join(judged)


def _facts_of_cells(cells: Sequence[JudgedCell]) -> str:
    compiled = _number_compiled(cells)
    text = f"{count(len(cells), 'cell')}: {verdict_counts(cells) or 'none'}; {compiled} ran compiled code"
    # In the fake lane compiled code runs, and proves nothing.
    fake = compiled - sum(cell.proven for cell in cells)
    if fake:
        text += f", {fake} of them in the fake lane"
    return text


def _number_compiled(judged: Iterable[JudgedCell]) -> int:
    return sum(each.compiled for each in judged)


def verdict_counts(judged: Iterable[Any], verdicts: Iterable[str] = VERDICTS) -> str:
    """``3 pass, 1 fail``: how many cells or tests have which status; empty where none has one of these."""
    counts = Counter(each.status for each in judged)
    return listed_counts(counts, verdicts)


def command_again(outcome: GateOutcome, finding: Finding) -> str:
    """The command that runs the first of the cells again; empty where no cell is meant."""
    # To run a skipped cell again would skip it again.
    if not finding.cells or finding.kind == "skip" or finding.weight != "fail":
        return ""
    name = finding.cells[0]
    if name in outcome.tests:
        return f"pytest {shlex.quote(name)}"
    if name not in outcome.cells:
        return ""
    matrix = outcome.merged.matrix["path"]
    node = f"{matrix}::{name}"
    # One check of the cell, where the finding is of one: it is the shortest way to see it.
    if finding.kind in CHECKS:
        node = f"{node}::{finding.kind}"
    return f"pytest --compile-matrix={matrix} '{node}'"


def shown_place(finding: Finding) -> str:
    """``file:line``, or nothing."""
    if finding.file and finding.line:
        return f"{finding.file}:{finding.line}"
    return finding.file


def _what_is_good(outcome: GateOutcome) -> str:
    """The cells, with the matrix that they are of; the tests; and how many of them have which verdict."""
    number = len(outcome.cells) + len(outcome.tests)
    parts = []
    if outcome.cells:
        parts.append(f"{count(len(outcome.cells), 'cell')} of {outcome.merged.matrix['path']}")
    if outcome.tests or not outcome.cells:
        parts.append(count(len(outcome.tests), "test"))
    are = "are"
    if number == 1:
        are = "is"
    every = (*outcome.cells.values(), *outcome.tests.values())
    text = f"the {' and '.join(parts)} {are} good on torch {outcome.merged.environment.get('torch')}: " \
           f"{verdict_counts(every, ('pass', 'xfail', 'skip'))}"
    known = len(outcome.allowed.excused) + len(outcome.allowed.tolerated)
    # Never silently: who reads PASS has to see that something failed and was let pass.
    if known:
        text += f", {known} fail as the policy allows"
    if outcome.cells and not any(map(_compares_numbers, outcome.cells.values())):
        text += "; no check compared numbers"
    return text


def _compares_numbers(cell: JudgedCell) -> bool:
    """Whether a check judged the cell that fails where it computes something else than eager."""
    return any(name in CHECKS and CHECKS[name].effect == WRONG for name in cell.verdicts)


def _lines_of_finding(outcome: GateOutcome, finding: Finding) -> Iterator[str]:
    head = f"{finding.weight:9} {finding.text}"
    where = shown_place(finding)
    # Many texts name their place themselves.
    if where and where not in finding.text:
        head += f"  {where}"
    yield head
    yield from _lines_of_evidence(finding)
    for line in finding.lines:
        yield f"{_INDENT}{line}"
    if finding.hint:
        begin, *rest = finding.hint.splitlines()
        yield f"{_INDENT}try    {begin}"
        for line in rest:
            yield f"{_INDENT}       {line}".rstrip()
    # The cells of a note are not to be mended.
    if finding.cells and finding.weight != "note":
        yield f"{_INDENT}{_named_cells(outcome, finding)}"
    command = command_again(outcome, finding)
    if command:
        yield f"{_INDENT}again  {command}"


def _lines_of_evidence(finding: Finding) -> Iterator[str]:
    evidence = _telling_lines(finding.evidence.splitlines())
    if len(evidence) > EVIDENCE:
        evidence[EVIDENCE:] = [f"... ({len(evidence) - EVIDENCE} more lines)"]
    yield from textwrap.indent("\n".join(evidence), " " * 12).splitlines()


def _telling_lines(evidence: list[str]) -> list[str]:
    """Of a failure as pytest shows it, the line that failed and what it says; not what is above: arguments, source."""
    failed = [line for line in evidence if line.startswith(("E  ", ">  "))]
    if not any(line.startswith("E  ") for line in failed):
        return evidence
    return failed


def _named_cells(outcome: GateOutcome, finding: Finding) -> str:
    """``cells  a, b, c and 4 more``."""
    noun = "cells"
    if finding.cells[0] in outcome.tests:
        noun = "tests"
    return f"{noun}  {first_names(finding.cells, CELLS)}"


# ---------------------------------------------------------------------------------------------------- beside a baseline
CHANGES_SHOWN: Final = 30
_SOFTWARE: Final = ("torch", "triton", "python", "compiler", "cuda")


@dataclass
class BaselineSummary:
    """A run beside an earlier one."""

    lines: list[tuple[str, dict[str, bool]]]
    """What is printed, with markup."""
    fresh: Fresh = field(default_factory=Fresh)
    """What is worse than it was."""


def compare_with_baseline(block: dict[str, Any], baseline: Sequence[Report]) -> BaselineSummary:
    """Compare. Only cells and tests that this run judged: others may be another shard's, or were not asked for."""
    today = datetime.date.today()
    try:
        now, then = merge_reports([Report("this run", block)]), merge_reports(baseline)
        # The default policy: what a release allows is not asked here.
        cells_now, cells_then = judge_cells(now, Policy(), today), judge_cells(then, Policy(), today)
    except ReportError as error:
        return BaselineSummary([(f"cannot be compared: {error}", {"red": True})])
    elsewhere = another_machine(now.environment, then.environment)

    planned = frozenset(now.matrix["cells_planned"])
    here = {name: cell for name, cell in cells_now.items() if cell.verdicts}
    # A cell that this run planned and did not judge is not gone; one that is planned no more is.
    before = {name: cell for name, cell in cells_then.items() if name in here or name not in planned}
    differences = find_changes(here, before, comparable=not elsewhere)
    tests, tests_then = judge_tests(now, ours=True), judge_tests(then, ours=True)
    tests_before = {name: test for name, test in tests_then.items() if name in tests}
    differences += find_changes(tests, tests_before, comparable=False, noun="test")

    lines = list(_lines_of_environment(now, then, elsewhere))
    lines += [(change.text, _markup_of_change(change)) for change in differences[:CHANGES_SHOWN]]
    if len(differences) > CHANGES_SHOWN:
        lines.append((f"... and {len(differences) - CHANGES_SHOWN} more", {}))
    if not differences:
        lines.append((f"{_number_compared(len(here), len(tests))} as in the baseline", {"green": True}))
    return BaselineSummary(lines, fresh_places(differences))


def _number_compared(cells: int, tests: int) -> str:
    """``3 cells and 1 test``; tests only where there are any."""
    if tests:
        return f"{count(cells, 'cell')} and {count(tests, 'test')}"
    return count(cells, "cell")


def _lines_of_environment(now: Merged, then: Merged, elsewhere: str) -> Iterator[tuple[str, dict[str, bool]]]:
    """What software differs, which is what many differences come from; and what can't be compared."""
    for key in _SOFTWARE:
        if now.environment and then.environment.get(key) != now.environment.get(key):
            yield f"{key}: {then.environment.get(key)} -> {now.environment.get(key)}", {"yellow": True}
    if then.partial:
        yield f"the baseline is partial: {then.problems[0]}", {"yellow": True}
    if elsewhere:
        yield f"{elsewhere}; times and sizes are not compared", {"yellow": True}


def _markup_of_change(change: Change) -> dict[str, bool]:
    if change.kind in BASELINE and change.sure:
        return {"red": True}
    if change.kind in BASELINE:
        return {"yellow": True}
    if change.kind == "improved":
        return {"green": True}
    return {}
