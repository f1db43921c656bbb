"""The gate's verdict as Markdown, for the step summary of GitHub Actions or a comment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from pytest_torchcompile.gate.announcement import again, facts, place, sentence
from pytest_torchcompile.gate.gate import Outcome
from pytest_torchcompile.observation import VERDICTS
from pytest_torchcompile.report.finding import foremost_findings
from pytest_torchcompile.report.harmless import harmless_text

__all__ = ["LONGEST", "block", "code", "escaped", "markdown", "short"]

LONGEST: Final = 900_000
"""Bytes: GitHub refuses a step summary over 1 MiB."""
SHOWN: Final = 50
TEXT: Final = 500
_MARKUP: Final = re.compile(r"([\\`*_{}\[\]<>()#+!|~&@-])")
_MARKS: Final = {"fail": "🔴 fail", "unusable": "🔴 unusable", "nothing": "🔴 nothing", "note": "⚪ note"}


def markdown(outcome: Outcome) -> str:
    """A heading with the sentence, a table of findings, a table of cells by backend and mode."""
    head = (_head(sentence(outcome), outcome.code), "", escaped(facts(outcome)), "")
    lines = [*head, *_findings(outcome), *_cells(outcome), *_tests(outcome)]
    return _bounded("\n".join(lines) + "\n")


def short(text: str, code: int) -> str:
    """The summary where there is no outcome: the reports could not be read or merged."""
    return _bounded(_head(text, code) + "\n")


def _head(text: str, code: int) -> str:
    word, _, rest = text.partition(": ")
    return f"### {'🔴' if code else '🟢'} torch.compile gate: {word}\n\n{escaped(rest)}"


def _findings(outcome: Outcome) -> Iterator[str]:
    if not outcome.findings:
        return
    yield from ("| | what | where | cells |", "|---|---|---|---|")
    shown = foremost_findings(outcome.findings, SHOWN)
    for finding in shown:
        more = len(finding.cells) - 2
        cells = ", ".join(code(cell) for cell in finding.cells[:2]) + (f" and {more} more" if more > 0 else "")
        text = "<br>".join(map(escaped, (finding.text, *finding.lines)))
        yield f"| {_MARKS[finding.weight]} | {text} | {escaped(place(finding))} | {cells} |"
    if len(outcome.findings) > len(shown):
        yield f"| | ... and {len(outcome.findings) - len(shown)} more | | |"
    yield ""
    for finding in shown:
        if "\n" in finding.hint:
            yield from block(finding.hint)
    commands = [command for finding in shown if (command := again(outcome, finding))]
    if commands:
        yield "Again:"
        yield from block("\n".join(commands))


def _cells(outcome: Outcome) -> Iterator[str]:
    """Cells by backend and mode, as in the terminal."""
    if not outcome.cells and outcome.tests:
        return
    places: dict[tuple[str, str], Counter[str]] = {}
    for cell in outcome.cells.values():
        key = str(cell.axes.get("backend")), str(cell.axes.get("mode"))
        places.setdefault(key, Counter())[cell.status] += 1
    modes = list(dict.fromkeys(mode for _, mode in places))
    yield "| | " + " | ".join(map(escaped, modes)) + " |"
    yield "|---|" + "---|" * len(modes)
    for backend in dict.fromkeys(backend for backend, _ in places):
        counts = (places.get((backend, mode), Counter()) for mode in modes)
        told = (escaped(", ".join(f"{count[v]} {v}" for v in VERDICTS if count[v])) or "-" for count in counts)
        yield f"| {escaped(backend)} | " + " | ".join(told) + " |"


def _tests(outcome: Outcome) -> Iterator[str]:
    """How many tests that use our fixtures have which verdict."""
    if outcome.tests:
        counts = Counter(test.status for test in outcome.tests.values())
        yield from ("", "| | |", "|---|---|")
        yield f"| tests | {', '.join(f'{counts[v]} {v}' for v in VERDICTS if counts[v])} |"


def escaped(text: str) -> str:
    """One line in which nothing is markup, so that a hostile name is shown and not run."""
    line = " ".join(harmless_text(text).split())
    return _MARKUP.sub(r"\\\1", line if len(line) <= TEXT else line[:TEXT] + "...")


def code(text: str) -> str:
    """Inline code in a table; a backtick or a bar in it would end it."""
    text = harmless_text(text)
    return f"`{text}`" if not set("`|\n\r") & set(text) else escaped(text)


def block(text: str) -> tuple[str, ...]:
    """A fenced block, with a line before and after; the fence is longer than any in the text."""
    text = harmless_text(text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return "", fence, text, fence, ""


def _bounded(text: str) -> str:
    data = text.encode("utf-8", errors="backslashreplace")
    if len(data) > LONGEST:
        data = data[:LONGEST] + b"\n\n(cut)\n"
    return data.decode("utf-8", errors="ignore")
