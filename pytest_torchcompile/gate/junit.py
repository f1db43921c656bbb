"""The gate's verdict as JUnit XML: a test case for each cell, with its axes and numbers as properties.

A cause is told in full at the first of its cells; the others say where that is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final
from xml.etree import ElementTree

from pytest_torchcompile.gate.announcement import WORDS, sentence
from pytest_torchcompile.gate.gate import Outcome
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.policy_limits import worst
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.finding import Finding
from pytest_torchcompile.report.harmless import harmless_text
from pytest_torchcompile.report.metrics import METRICS

__all__ = ["junit", "refused"]

_FORBIDDEN: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 does not allow, lone surrogates among it."""


def junit(outcome: Outcome) -> str:
    """Suites: the cells, the tests that use our fixtures if there are any, and what the gate says of the whole run."""
    root = ElementTree.Element("testsuites")
    cells = ElementTree.SubElement(root, "testsuite", name="torch.compile cells")
    findings = _causes(outcome)
    for cell in outcome.cells.values():
        _cell(cells, cell, outcome.merged.matrix["path"], outcome, findings)
    if outcome.tests:
        tests = ElementTree.SubElement(root, "testsuite", name="torch.compile tests")
        for test in outcome.tests.values():
            _cell(tests, test, test.id.partition("::")[0], outcome, findings)
    whole = ElementTree.SubElement(root, "testsuite", name="torch.compile gate")
    case = ElementTree.SubElement(whole, "testcase", classname="gate", name="release")
    if outcome.code:
        tag = "failure" if outcome.code == 1 else "error"
        text = "\n".join(finding.text for finding in outcome.findings if finding.weight != "note")
        ElementTree.SubElement(case, tag, message=_clean(sentence(outcome))).text = _clean(text)
    return _text(root)


def refused(text: str, code: int) -> str:
    """The file where there is no outcome: the reports could not be read or merged."""
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", name="torch.compile gate")
    case = ElementTree.SubElement(suite, "testcase", classname="gate", name="release")
    ElementTree.SubElement(case, "error", message=_clean(f"{WORDS.get(code, code)}: {text}"))
    return _text(root)


def _cell(suite: ElementTree.Element, cell: JudgedCell, file: str, outcome: Outcome,
          findings: Mapping[str, Sequence[Finding]]) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=_clean(file), name=_clean(cell.id),
                                  time=f"{cell.seconds or 0:.3f}")
    properties = ElementTree.SubElement(case, "properties")
    numbers = {name: worst(cell.ranks, name) for name in METRICS}
    for name, shown in (*cell.axes.items(), *((name, n) for name, n in numbers.items() if n is not None)):
        ElementTree.SubElement(properties, "property", name=_clean(str(name)), value=_clean(str(shown)))
    failing = outcome.allowed.failing.get(cell.id)
    if failing:
        verdicts = {check["verdict"] for check in failing.values()}
        found = findings.get(cell.id, [])
        tag = "failure" if verdicts <= {"fail", "xpass"} else "error"
        message = found[0].text if found else f"{next(iter(failing))}: {', '.join(sorted(verdicts))}"
        text = "\n\n".join(_told(finding, cell.id) for finding in found)
        ElementTree.SubElement(case, tag, message=_clean(message)).text = _clean(text)
    elif cell.skipped is not None:
        ElementTree.SubElement(case, "skipped", message=_clean(cell.skipped))
    elif not cell.verdicts or "not_run" in {check["verdict"] for check in cell.verdicts.values()}:
        ElementTree.SubElement(case, "error", message="was not judged")
    elif cell.contradictions:
        ElementTree.SubElement(case, "error", message=_clean(cell.contradictions[0]))
    elif cell.id in outcome.allowed.excused or cell.status != "pass":
        known = outcome.allowed.excused.get(cell.id, "") or cell.status
        ElementTree.SubElement(case, "skipped", message=_clean(f"known failure: {known}"))


def _causes(outcome: Outcome) -> dict[str, list[Finding]]:
    """Cell to the findings that tell why it fails, the worst first."""
    found: dict[str, list[Finding]] = {}
    for finding in outcome.findings:
        for cell in finding.cells if finding.cause is not None else ():
            found.setdefault(cell, []).append(finding)
    return found


def _told(finding: Finding, cell: str) -> str:
    """The whole of a cause in its first cell, and there it is said in the others."""
    if cell != finding.cells[0]:
        cells = count(len(finding.cells), "cell")
        return f"{finding.text}\n(one cause in {cells}, told at {finding.cells[0]})"
    return "\n".join(filter(None, (finding.text, finding.evidence, *finding.lines, finding.hint and
                                   f"try {finding.hint}")))


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", harmless_text(text))


def _text(root: ElementTree.Element) -> str:
    for suite in root:
        counts = Counter(child.tag for case in suite for child in case)
        suite.attrib |= {"tests": str(len(suite)), "failures": str(counts["failure"]), "errors": str(counts["error"]),
                         "skipped": str(counts["skipped"])}
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode")
