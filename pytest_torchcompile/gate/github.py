"""Annotations of GitHub Actions: an error at the user's line of each graph break, recompile or other cause."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from typing import Final

from pytest_torchcompile.checks.severity import Severity
from pytest_torchcompile.gate.announcement import sentence
from pytest_torchcompile.gate.gate import Outcome
from pytest_torchcompile.report.finding import Finding
from pytest_torchcompile.report.harmless import harmless_text

__all__ = ["MOST", "command", "commands"]

MOST: Final = 10
"""GitHub shows ten errors of a step, and drops the others without a word."""
TEXT: Final = 1000
"""Characters of an annotation."""
LONGEST: Final = 60_000
"""Characters of the last annotation, which may have to name many models; GitHub takes 64 KiB."""
SHORT: Final = 200
"""Characters of a finding that shares the last annotation with others."""


def commands(outcome: Outcome) -> Iterator[str]:
    """Workflow commands, at most :data:`MOST`; the last one says how many more there are.

    Files are named from the root of the git repository, as GitHub wants them.
    """
    found = [finding for finding in outcome.findings if finding.weight != "note"]
    prefix = (outcome.merged.git or {}).get("prefix", "")
    shown = found if len(found) <= MOST else found[:MOST - 1]
    for finding in shown:
        yield command(_text(finding)[:TEXT], *_place(finding, prefix, outcome.policy.path))
    if rest := found[len(shown):]:
        yield command(_rest(outcome, rest))


def _rest(outcome: Outcome, rest: Sequence[Finding]) -> str:
    """What no annotation of its own is left for: how many findings, and each model with wrong numbers by name."""
    wrong = [finding for finding in rest if finding.severity == Severity.WRONG_NUMBERS]
    lines = [f"{len(rest)} more findings: see the summary. {sentence(outcome)}"]
    lines += [f"also wrong numbers in {_cells(finding)}: {finding.text}"[:SHORT] for finding in wrong]
    return "\n".join(lines)


def command(text: str, file: str = "", line: int = 0) -> str:
    """One workflow command, escaped as GitHub's toolkit does it (packages/core/src/command.ts)."""
    where = f"file={_property(file)}," + (f"line={line}," if line else "") if file else ""
    return f"::error {where}title=torch.compile gate::{_data(harmless_text(text[:LONGEST]))}"


def _place(finding: Finding, prefix: str, policy: str) -> tuple[str, int]:
    """Where to show it: in the policy as it was named, else in the model's repository."""
    if not finding.file or finding.file.startswith(("/", "<")):
        return "", 0
    if finding.file == policy:
        return finding.file, finding.line
    return posixpath.join(prefix, finding.file), finding.line


def _text(finding: Finding) -> str:
    cells = f" [{_cells(finding)}]" if finding.cells else ""
    return "\n".join((f"{finding.text}{cells}", *finding.lines))


def _cells(finding: Finding) -> str:
    more = len(finding.cells) - 1
    return finding.cells[0] + (f" and {more} more" if more else "")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(harmless_text(text)).replace(":", "%3A").replace(",", "%2C")
