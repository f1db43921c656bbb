"""The gate's verdict as Markdown, for the step summary of GitHub Actions or a comment.

And texts of a report within Markdown, of which the playbook is made: prose, tables, cells as evidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from pytest_torchcompile.gate.announcement import command_again, run_facts, sentence, shown_place, verdict_counts
from pytest_torchcompile.gate.gate import GateOutcome
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.report.finding import Finding, foremost_findings
from pytest_torchcompile.report.safe_output import harmless_text

__all__ = [
    "LONGEST", "code_block", "escape_line", "evidence", "inline_code", "markdown", "markdown_of_refusal", "prose",
    "table",
]

LONGEST: Final = 900_000
"""Bytes: GitHub refuses a step summary over 1 MiB."""
SHOWN: Final = 50
TEXT: Final = 500
_MARKUP: Final = re.compile(r"([\\`*_{}\[\]<>()#+!|~&@-])")
_MARKS: Final = {"fail": "🔴 fail", "unusable": "🔴 unusable", "nothing": "🔴 nothing", "note": "⚪ note"}


def markdown(outcome: GateOutcome) -> str:
    """A heading with the sentence, a table of findings, a table of cells by backend and mode."""
    head = (_heading(sentence(outcome), outcome.code), "", escape_line(run_facts(outcome)), "")
    lines = [*head, *_findings_table(outcome), *_cells_table(outcome), *_tests_table(outcome)]
    return _cut_to_size("\n".join(lines) + "\n")


def markdown_of_refusal(text: str, code: int) -> str:
    """The summary where there is no outcome: the reports could not be read or merged."""
    return _cut_to_size(_heading(text, code) + "\n")


def _heading(text: str, code: int) -> str:
    word, _, rest = text.partition(": ")
    mark = "🟢"
    if code:
        mark = "🔴"
    return f"### {mark} torch.compile gate: {word}\n\n{escape_line(rest)}"


def _findings_table(outcome: GateOutcome) -> Iterator[str]:
    if not outcome.findings:
        return
    yield from ("| | what | where | cells |", "|---|---|---|---|")
    shown = foremost_findings(outcome.findings, SHOWN)
    for finding in shown:
        text = "<br>".join(map(escape_line, (finding.text, *finding.lines)))
        cells = _first_cells(finding, 2)
        yield f"| {_MARKS[finding.weight]} | {text} | {escape_line(shown_place(finding))} | {cells} |"
    if len(outcome.findings) > len(shown):
        yield f"| | ... and {len(outcome.findings) - len(shown)} more | | |"
    yield ""
    # A hint of several lines is something to paste, which no cell of a table can hold.
    for finding in shown:
        if "\n" in finding.hint:
            yield from code_block(finding.hint)
    commands = list(filter(None, [command_again(outcome, finding) for finding in shown]))
    if commands:
        yield "Again:"
        yield from code_block("\n".join(commands))


def _first_cells(finding: Finding, shown: int) -> str:
    cells = ", ".join(map(inline_code, finding.cells[:shown]))
    if len(finding.cells) > shown:
        return f"{cells} and {len(finding.cells) - shown} more"
    return cells


def _cells_table(outcome: GateOutcome) -> Iterator[str]:
    """Cells by backend and mode, as in the terminal."""
    if not outcome.cells and outcome.tests:
        return
    by_backend: dict[str, dict[str, list[JudgedCell]]] = {}
    modes: dict[str, None] = {}
    for cell in outcome.cells.values():
        backend, mode = str(cell.axes.get("backend")), str(cell.axes.get("mode"))
        modes[mode] = None
        # In the order of the report, which is that of the matrix.
        by_backend.setdefault(backend, {}).setdefault(mode, []).append(cell)
    yield f"| | {' | '.join(map(escape_line, modes))} |"
    yield "|---|" + "---|" * len(modes)
    for backend, by_mode in by_backend.items():
        counts = [escape_line(verdict_counts(by_mode.get(mode, ()))) or "-" for mode in modes]
        yield f"| {escape_line(backend)} | {' | '.join(counts)} |"


def _tests_table(outcome: GateOutcome) -> Iterator[str]:
    """How many tests that use our fixtures have which verdict."""
    if outcome.tests:
        yield from ("", "| | |", "|---|---|")
        yield f"| tests | {verdict_counts(outcome.tests.values())} |"


def escape_line(text: str) -> str:
    """One line in which nothing is markup, so that a hostile name is shown and not run."""
    line = " ".join(harmless_text(text).split())
    if len(line) > TEXT:
        line = line[:TEXT] + "..."
    return _MARKUP.sub(r"\\\1", line)


def inline_code(text: str) -> str:
    """Inline code in a table; a backtick or a bar in it would end it."""
    text = harmless_text(text)
    if set("`|\n\r") & set(text):
        return escape_line(text)
    return f"`{text}`"


def code_block(text: str) -> tuple[str, ...]:
    """A fenced block, with a line before and after; the fence is longer than any in the text."""
    text = harmless_text(text)
    longest = max(map(len, re.findall("`+", text)), default=0)
    # A shorter fence in the text would end the block.
    fence = "`" * max(3, 1 + longest)
    return "", fence, text, fence, ""


def _cut_to_size(text: str) -> str:
    data = text.encode("utf-8", errors="backslashreplace")
    if len(data) > LONGEST:
        data = data[:LONGEST] + b"\n\n(cut)\n"
    # The cut may go through a letter of several bytes.
    return data.decode("utf-8", errors="ignore")


# ------------------------------------------------------------------------------------ texts of a report within Markdown
EVIDENCE_SHOWN: Final = 2
"""Cells named behind a sentence."""
_INLINE_MARKUP: Final = re.compile(r"([\\`*\[\]<>|&~#]|(?<!\w)_|_(?!\w))")
"""What is markup within a line of GitHub's Markdown (spec 0.29); ``_`` within a word is none."""


def prose(text: str) -> str:
    """A report's text on one line, in which nothing is markup but its own `code`.

    A backtick without its partner would pair with one of ours, so that the rest of the line changed sides: then none
    is taken for markup.

    >>> prose("set `a_b` to *1* <b>")
    'set `a_b` to \\\\*1\\\\* \\\\<b\\\\>'
    """
    line = " ".join(harmless_text(text).split())
    if len(line) > TEXT:
        line = f"{line[:TEXT]}..."
    parts = line.split("`")
    if "``" in line or "|" in line or len(parts) % 2 == 0:
        return _escape_markup(line)
    # Backticks come in pairs, so every second part is code.
    parts[::2] = map(_escape_markup, parts[::2])
    parts[1::2] = map(inline_code, parts[1::2])
    return "".join(parts)


def _escape_markup(text: str) -> str:
    return _INLINE_MARKUP.sub(r"\\\1", text)


def evidence(cells: Iterable[str]) -> str:
    """``(`a`, `b` and 3 more)``."""
    names = list(dict.fromkeys(cells))
    shown = ", ".join(map(inline_code, names[:EVIDENCE_SHOWN]))
    if len(names) > EVIDENCE_SHOWN:
        return f"({shown} and {len(names) - EVIDENCE_SHOWN} more)"
    return f"({shown})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table whose cells are Markdown already, and the empty line after it."""
    return [_table_row(head), "|" + "---|" * len(head), *map(_table_row, rows), ""]


def _table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
