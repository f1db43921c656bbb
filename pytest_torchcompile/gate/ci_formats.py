"""The gate's verdict for CI: JUnit XML, and annotations of GitHub Actions.

JUnit has a test case for each cell, with its axes and numbers as properties. A cause is told in full at the first of
its cells; the others say where that is. GitHub shows an error at the user's line of each graph break, recompile or
other cause.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from xml.etree import ElementTree

from pytest_torchcompile.checks.severity import Severity
from pytest_torchcompile.gate.announcement import WORDS, sentence
from pytest_torchcompile.gate.gate import GateOutcome
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.policy_limits import worst_rank
from pytest_torchcompile.observation import verdicts_in
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.finding import Finding
from pytest_torchcompile.report.metrics import METRICS
from pytest_torchcompile.report.safe_output import harmless_text

__all__ = ["MOST_ANNOTATIONS", "annotate_findings", "junit", "junit_of_refusal", "workflow_command"]

_FORBIDDEN: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 does not allow, lone surrogates among it."""


def junit(outcome: GateOutcome) -> str:
    """Suites: the cells, the tests that use our fixtures if there are any, and what the gate says of the whole run."""
    root = ElementTree.Element("testsuites")
    findings = _causes_by_cell(outcome)
    cells = ElementTree.SubElement(root, "testsuite", name="torch.compile cells")
    for cell in outcome.cells.values():
        _add_cell(cells, cell, outcome.merged.matrix["path"], outcome, findings)
    if outcome.tests:
        tests = ElementTree.SubElement(root, "testsuite", name="torch.compile tests")
        for test in outcome.tests.values():
            _add_cell(tests, test, test.id.partition("::")[0], outcome, findings)
    release = _add_release(root)
    if outcome.code:
        # JUnit's failure is what was judged and is bad; an error is what could not be judged.
        tag = "error"
        if outcome.code == 1:
            tag = "failure"
        decisive = [finding.text for finding in outcome.findings if finding.weight != "note"]
        _add_result(release, tag, sentence(outcome), "\n".join(decisive))
    return _document_text(root)


def junit_of_refusal(text: str, code: int) -> str:
    """The file where there is no outcome: the reports could not be read or merged."""
    root = ElementTree.Element("testsuites")
    _add_result(_add_release(root), "error", f"{WORDS.get(code, code)}: {text}")
    return _document_text(root)


def _add_release(root: ElementTree.Element) -> ElementTree.Element:
    suite = ElementTree.SubElement(root, "testsuite", name="torch.compile gate")
    return ElementTree.SubElement(suite, "testcase", classname="gate", name="release")


def _add_result(case: ElementTree.Element, tag: str, message: str, text: str | None = None) -> None:
    result = ElementTree.SubElement(case, tag, message=_clean_text(message))
    if text is not None:
        result.text = _clean_text(text)


def _add_cell(suite: ElementTree.Element, cell: JudgedCell, file: str, outcome: GateOutcome,
              findings: Mapping[str, Sequence[Finding]]) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=_clean_text(file), name=_clean_text(cell.id),
                                  time=f"{cell.seconds or 0:.3f}")
    properties = ElementTree.SubElement(case, "properties")
    for name, value in (*cell.axes.items(), *_measured_metrics(cell)):
        ElementTree.SubElement(properties, "property", name=_clean_text(str(name)), value=_clean_text(str(value)))
    verdicts = verdicts_in(cell.verdicts)
    if cell.id in outcome.allowed.failing:
        _add_failure(case, cell.id, outcome.allowed.failing[cell.id], findings.get(cell.id, []))
    elif cell.skipped is not None:
        _add_result(case, "skipped", cell.skipped)
    elif not verdicts or "not_run" in verdicts:
        _add_result(case, "error", "was not judged")
    elif cell.contradictions:
        _add_result(case, "error", cell.contradictions[0])
    elif cell.id in outcome.allowed.excused or cell.status != "pass":
        # JUnit has no word for a failure that is known.
        known = outcome.allowed.excused.get(cell.id) or cell.status
        _add_result(case, "skipped", f"known failure: {known}")


def _measured_metrics(cell: JudgedCell) -> Iterator[tuple[str, float]]:
    for name in METRICS:
        number = worst_rank(cell.ranks, name)
        if number is not None:
            yield name, number


def _add_failure(case: ElementTree.Element, cell: str, failing: Mapping[str, Mapping[str, Any]],
                 findings: Sequence[Finding]) -> None:
    verdicts = set(verdicts_in(failing))
    tag = "error"
    if verdicts <= {"fail", "xpass"}:
        tag = "failure"
    message = f"{next(iter(failing))}: {', '.join(sorted(verdicts))}"
    if findings:
        message = findings[0].text
    _add_result(case, tag, message, "\n\n".join(_text_of_cause(finding, cell) for finding in findings))


def _causes_by_cell(outcome: GateOutcome) -> dict[str, list[Finding]]:
    """Cell to the findings that tell why it fails, the worst first."""
    by_cell: dict[str, list[Finding]] = {}
    for finding in outcome.findings:
        if finding.cause is not None:
            for cell in finding.cells:
                by_cell.setdefault(cell, []).append(finding)
    return by_cell


def _text_of_cause(finding: Finding, cell: str) -> str:
    """The whole of a cause in its first cell, and there it is said in the others."""
    # A cause of a thousand cells would make a file of a thousand copies.
    if cell != finding.cells[0]:
        cells = count(len(finding.cells), "cell")
        return f"{finding.text}\n(one cause in {cells}, told at {finding.cells[0]})"
    parts = [finding.text, finding.evidence, *finding.lines]
    if finding.hint:
        parts.append(f"try {finding.hint}")
    return "\n".join(filter(None, parts))


def _clean_text(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", harmless_text(text))


def _document_text(root: ElementTree.Element) -> str:
    # Readers of JUnit show these numbers, and do not count themselves.
    for suite in root:
        counts: Counter[str] = Counter()
        for case in suite:
            counts.update(child.tag for child in case)
        suite.attrib |= {"tests": str(len(suite)), "failures": str(counts["failure"]), "errors": str(counts["error"]),
                         "skipped": str(counts["skipped"])}
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode")


# ------------------------------------------------------------------------------------------------ annotations of GitHub
MOST_ANNOTATIONS: Final = 10
"""GitHub shows ten errors of a step, and drops the others without a word."""
ANNOTATION_LENGTH: Final = 1000
"""Characters of an annotation."""
LAST_LENGTH: Final = 60_000
"""Characters of the last annotation, which may have to name many models; GitHub takes 64 KiB."""
SHARED_LENGTH: Final = 200
"""Characters of a finding that shares the last annotation with others."""


def annotate_findings(outcome: GateOutcome) -> Iterator[str]:
    """Workflow commands, at most :data:`MOST_ANNOTATIONS`; the last one says how many more there are.

    Files are named from the root of the git repository, as GitHub wants them.
    """
    decisive = [finding for finding in outcome.findings if finding.weight != "note"]
    shown = decisive
    if len(decisive) > MOST_ANNOTATIONS:
        # The last annotation is for the rest.
        shown = decisive[:MOST_ANNOTATIONS - 1]
    for finding in shown:
        file, line = _place_in_repository(finding, outcome)
        yield workflow_command(_text_of_finding(finding)[:ANNOTATION_LENGTH], file, line)
    rest = decisive[len(shown):]
    if rest:
        yield workflow_command(_text_of_rest(outcome, rest))


def workflow_command(text: str, file: str = "", line: int = 0) -> str:
    """One workflow command, escaped as GitHub's toolkit does it (packages/core/src/command.ts)."""
    properties = ["title=torch.compile gate"]
    if file and line:
        properties.insert(0, f"line={line}")
    if file:
        properties.insert(0, f"file={_escape_property(file)}")
    return f"::error {','.join(properties)}::{_escape_data(harmless_text(text[:LAST_LENGTH]))}"


def _text_of_rest(outcome: GateOutcome, rest: Sequence[Finding]) -> str:
    """What no annotation of its own is left for: how many findings, and each model with wrong numbers by name."""
    lines = [f"{len(rest)} more findings: see the summary. {sentence(outcome)}"]
    for finding in rest:
        if finding.severity == Severity.WRONG_NUMBERS:
            lines.append(f"also wrong numbers in {first_names(finding.cells, 1)}: {finding.text}"[:SHARED_LENGTH])
    return "\n".join(lines)


def _place_in_repository(finding: Finding, outcome: GateOutcome) -> tuple[str, int]:
    """Where to show it: in the policy as it was named, else in the model's repository."""
    # An absolute path, or a name like `<string>`, is no file of the repository.
    if not finding.file or finding.file.startswith(("/", "<")):
        return "", 0
    if finding.file == outcome.policy.path:
        return finding.file, finding.line
    prefix = (outcome.merged.git or {}).get("prefix", "")
    return posixpath.join(prefix, finding.file), finding.line


def _text_of_finding(finding: Finding) -> str:
    text = finding.text
    if finding.cells:
        text = f"{text} [{first_names(finding.cells, 1)}]"
    return "\n".join((text, *finding.lines))


def _escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(harmless_text(text)).replace(":", "%3A").replace(",", "%2C")
