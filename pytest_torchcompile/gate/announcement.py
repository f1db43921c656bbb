"""The gate's verdict as text: first the one sentence that a release manager needs, then what is behind it."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Final

from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.gate.gate import Outcome
from pytest_torchcompile.observation import VERDICTS
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.finding import Finding, foremost_findings
from pytest_torchcompile.report.harmless import harmless_text
from pytest_torchcompile.report.headline import headline, shorten_to_headline

__all__ = ["WORDS", "again", "announcement", "facts", "place", "refusal", "sentence"]

WORDS: Final = {0: "PASS", 1: "FAIL", 2: "UNUSABLE", 3: "NOTHING TO JUDGE"}
SHOWN: Final = 20
EVIDENCE: Final = 12
CELLS: Final = 3


def sentence(outcome: Outcome) -> str:
    """What somebody who reads nothing else should know, in at most 25 words."""
    return harmless_text(_sentence(outcome))


def _sentence(outcome: Outcome) -> str:
    code = outcome.code
    if code == 0:
        return shorten_to_headline(f"PASS: {_good(outcome)}")
    decisive = [finding for finding in outcome.findings if finding.weight != "note"]
    first = decisive[0]
    if first.cause is not None:
        others = sum(finding.cause is None for finding in decisive)
        return headline(outcome.causes, f"{WORDS[code]}: ", others)
    more = f"; and {count(len(decisive) - 1, 'more finding')}" if decisive[1:] else ""
    return f"{shorten_to_headline(f'{WORDS[code]}: {first.text}', len(more.split()))}{more}"


def refusal(error: Exception, code: int) -> str:
    """The sentence for reports that could not be read or merged."""
    return harmless_text(f"{WORDS[code]}: {error}")


def announcement(outcome: Outcome) -> Iterator[str]:
    """The lines: the sentence, the findings, the facts."""
    yield sentence(outcome)
    yield ""
    shown = foremost_findings(outcome.findings, SHOWN)
    for finding in shown:
        for line in _lines(outcome, finding):
            yield harmless_text(line)
    if len(outcome.findings) > len(shown):
        yield f"... and {len(outcome.findings) - len(shown)} more findings"
    if outcome.findings:
        yield ""
    yield harmless_text(facts(outcome))


def facts(outcome: Outcome) -> str:
    """What was judged: versions, devices, counts."""
    environment = outcome.merged.environment
    devices = ", ".join(dict.fromkeys(map(str, environment.get("devices") or ()))) or "no device told"
    counts = Counter(cell.status for cell in outcome.cells.values())
    told = ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v]) or "none"
    ran = sum(cell.compiled for cell in outcome.cells.values())
    fake = ran - sum(cell.proven for cell in outcome.cells.values())
    lane = f", {fake} of them in the fake lane" if fake else ""
    shards = f"; {len(outcome.merged.reports)} shards" if len(outcome.merged.reports) > 1 else ""
    commit = f"; commit {git['commit'][:12]}{' with changes' * git['changed']}" if (git := outcome.merged.git) else ""
    where = f"{outcome.merged.matrix['path']} on torch {environment.get('torch', '(not told)')}".lstrip()
    cells = f"{count(len(outcome.cells), 'cell')}: {told}; {ran} ran compiled code{lane}"
    told_things = [cells] if outcome.cells or not outcome.tests else []
    if outcome.tests:
        counts = Counter(test.status for test in outcome.tests.values())
        told = ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])
        ran = sum(test.compiled for test in outcome.tests.values())
        told_things.append(f"{count(len(outcome.tests), 'test')}: {told}; {ran} ran compiled code")
    return f"{where}, {devices}: {'; '.join(told_things)}{shards}{commit}"


def again(outcome: Outcome, finding: Finding) -> str:
    """The command that runs the first of the cells again; empty where no cell is meant."""
    if not finding.cells or finding.kind == "skip" or finding.weight != "fail":
        return ""
    if finding.cells[0] in outcome.tests:
        return f"pytest {shlex.quote(finding.cells[0])}"
    if finding.cells[0] not in outcome.cells:
        return ""
    matrix, cell = outcome.merged.matrix["path"], finding.cells[0]
    check = f"::{finding.kind}" if finding.kind in CHECKS else ""
    return f"pytest --compile-matrix={matrix} '{matrix}::{cell}{check}'"


def place(finding: Finding) -> str:
    """``file:line``, or nothing."""
    return (f"{finding.file}:{finding.line}" if finding.line else finding.file) if finding.file else ""


def _good(outcome: Outcome) -> str:
    counts = Counter(each.status for each in (*outcome.cells.values(), *outcome.tests.values()))
    good = ", ".join(f"{counts[v]} {v}" for v in ("pass", "xfail", "skip") if counts[v])
    known = len(outcome.allowed.excused) + len(outcome.allowed.tolerated)
    fails = f", {known} fail as the policy allows" if known else ""
    environment = outcome.merged.environment
    are = "is" if len(outcome.cells) + len(outcome.tests) == 1 else "are"
    matrix = f" of {outcome.merged.matrix['path']}" if outcome.cells else ""
    tests = f" and {count(len(outcome.tests), 'test')}" if outcome.cells and outcome.tests else ""
    what = count(len(outcome.cells), "cell") if outcome.cells else count(len(outcome.tests), "test")
    return f"the {what}{matrix}{tests} {are} good on torch {environment.get('torch')}: {good}{fails}"


def _lines(outcome: Outcome, finding: Finding) -> Iterator[str]:
    where = place(finding)
    yield f"{finding.weight:9} {finding.text}" + (f"  {where}" if where and where not in finding.text else "")
    evidence = finding.evidence.splitlines()
    if len(evidence) > EVIDENCE:
        evidence[EVIDENCE:] = [f"... ({len(evidence) - EVIDENCE} more lines)"]
    yield from textwrap.indent("\n".join(evidence), " " * 12).splitlines()
    yield from (f"{'':10}{line}" for line in finding.lines)
    if finding.hint:
        first, *rest = finding.hint.splitlines()
        yield f"{'':10}try    {first}"
        yield from (f"{'':10}       {line}".rstrip() for line in rest)
    if finding.cells and finding.weight != "note":
        shown = ", ".join(finding.cells[:CELLS])
        more = len(finding.cells) - CELLS
        what = "tests" if finding.cells[0] in outcome.tests else "cells"
        yield f"{'':10}{what}  {shown}" + (f" and {more} more" if more > 0 else "")
    if command := again(outcome, finding):
        yield f"{'':10}again  {command}"
