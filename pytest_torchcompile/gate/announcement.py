"""The gate's verdict as text: first the one sentence that a release manager needs, then what is behind it."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.gate.gate import GateOutcome
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.observation import VERDICTS
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.finding import Finding, foremost_findings
from pytest_torchcompile.report.harmless import harmless_text
from pytest_torchcompile.report.headline import headline, shorten_to_headline

__all__ = ["WORDS", "announcement", "command_again", "refusal", "run_facts", "sentence", "shown_place",
           "verdict_counts"]

WORDS: Final = {0: "PASS", 1: "FAIL", 2: "UNUSABLE", 3: "NOTHING TO JUDGE"}
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


def run_facts(outcome: GateOutcome) -> str:
    """What was judged: versions, devices, counts."""
    environment = outcome.merged.environment
    devices = ", ".join(dict.fromkeys(map(str, environment.get("devices") or ()))) or "no device told"
    where = f"{outcome.merged.matrix['path']} on torch {environment.get('torch', '(not told)')}".lstrip()
    judged = []
    # A run of tests alone has no matrix, so that "0 cells" would say nothing.
    if outcome.cells or not outcome.tests:
        judged.append(_facts_of_cells(list(outcome.cells.values())))
    if outcome.tests:
        tests = outcome.tests.values()
        judged.append(f"{count(len(tests), 'test')}: {verdict_counts(tests)}; {_number_compiled(tests)} ran compiled "
                      "code")
    text = f"{where}, {devices}: {'; '.join(judged)}"
    if len(outcome.merged.reports) > 1:
        text += f"; {len(outcome.merged.reports)} shards"
    git = outcome.merged.git
    if git:
        text += f"; commit {git['commit'][:12]}"
        if git["changed"]:
            text += " with changes"
    return text


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
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in verdicts if counts[verdict])


def command_again(outcome: GateOutcome, finding: Finding) -> str:
    """The command that runs the first of the cells again; empty where no cell is meant."""
    if not finding.cells or finding.kind == "skip" or finding.weight != "fail":
        return ""
    name = finding.cells[0]
    if name in outcome.tests:
        return f"pytest {shlex.quote(name)}"
    if name not in outcome.cells:
        return ""
    matrix = outcome.merged.matrix["path"]
    node = f"{matrix}::{name}"
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
    if known:
        text += f", {known} fail as the policy allows"
    return text


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
    evidence = finding.evidence.splitlines()
    if len(evidence) > EVIDENCE:
        evidence[EVIDENCE:] = [f"... ({len(evidence) - EVIDENCE} more lines)"]
    yield from textwrap.indent("\n".join(evidence), " " * 12).splitlines()


def _named_cells(outcome: GateOutcome, finding: Finding) -> str:
    """``cells  a, b, c and 4 more``."""
    noun = "cells"
    if finding.cells[0] in outcome.tests:
        noun = "tests"
    return f"{noun}  {first_names(finding.cells, CELLS)}"
