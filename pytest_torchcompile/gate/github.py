"""Annotations of GitHub Actions: an error at the user's line of each graph break, recompile or other cause."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from typing import Final

from pytest_torchcompile.checks.severity import Severity
from pytest_torchcompile.gate.announcement import sentence
from pytest_torchcompile.gate.gate import GateOutcome
from pytest_torchcompile.quantity import first_names
from pytest_torchcompile.report.finding import Finding
from pytest_torchcompile.report.harmless import harmless_text

__all__ = ["MOST", "annotate_findings", "workflow_command"]

MOST: Final = 10
"""GitHub shows ten errors of a step, and drops the others without a word."""
TEXT: Final = 1000
"""Characters of an annotation."""
LONGEST: Final = 60_000
"""Characters of the last annotation, which may have to name many models; GitHub takes 64 KiB."""
SHORT: Final = 200
"""Characters of a finding that shares the last annotation with others."""


def annotate_findings(outcome: GateOutcome) -> Iterator[str]:
    """Workflow commands, at most :data:`MOST`; the last one says how many more there are.

    Files are named from the root of the git repository, as GitHub wants them.
    """
    decisive = [finding for finding in outcome.findings if finding.weight != "note"]
    shown = decisive
    if len(decisive) > MOST:
        # The last annotation is for the rest.
        shown = decisive[:MOST - 1]
    for finding in shown:
        file, line = _place_in_repository(finding, outcome)
        yield workflow_command(_text_of_finding(finding)[:TEXT], file, line)
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
    return f"::error {','.join(properties)}::{_escape_data(harmless_text(text[:LONGEST]))}"


def _text_of_rest(outcome: GateOutcome, rest: Sequence[Finding]) -> str:
    """What no annotation of its own is left for: how many findings, and each model with wrong numbers by name."""
    lines = [f"{len(rest)} more findings: see the summary. {sentence(outcome)}"]
    for finding in rest:
        if finding.severity == Severity.WRONG_NUMBERS:
            lines.append(f"also wrong numbers in {first_names(finding.cells, 1)}: {finding.text}"[:SHORT])
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
