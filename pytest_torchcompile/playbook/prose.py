"""Prose: texts of a report within Markdown, and cells as evidence behind a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from pytest_torchcompile.gate.markdown import inline_code
from pytest_torchcompile.report.harmless import harmless_text

__all__ = ["evidence", "prose", "table"]

SHOWN: Final = 2
"""Cells named behind a sentence."""
TEXT: Final = 500
_MARKUP: Final = re.compile(r"([\\`*\[\]<>|&~#]|(?<!\w)_|_(?!\w))")
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
    return _MARKUP.sub(r"\\\1", text)


def evidence(cells: Iterable[str]) -> str:
    """``(`a`, `b` and 3 more)``."""
    names = list(dict.fromkeys(cells))
    shown = ", ".join(map(inline_code, names[:SHOWN]))
    if len(names) > SHOWN:
        return f"({shown} and {len(names) - SHOWN} more)"
    return f"({shown})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table whose cells are Markdown already, and the empty line after it."""
    return [_table_row(head), "|" + "---|" * len(head), *map(_table_row, rows), ""]


def _table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
