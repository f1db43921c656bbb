"""Kept logs: what torch has logged of each cell, for ``--compile-logs``; a rank writes it, and the end prints it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from pytest_torchcompile.cell import file_word
from pytest_torchcompile.report.safe_output import LOGS, harmless_text, make_folder

__all__ = ["kept_log_lines", "log_folder", "start_logs_anew"]

_MOST_LINES: Final = 200
"""Of one file; the rest of it is in the file."""


def log_folder(root: Path) -> Path:
    """Where the files are."""
    return root / LOGS


def start_logs_anew(root: Path) -> None:
    """Drop the files of an earlier run: each would be taken for this one's."""
    shutil.rmtree(log_folder(root), ignore_errors=True)
    make_folder(log_folder(root))


def kept_log_lines(root: Path, cells: Iterable[str]) -> Iterator[str]:
    """What was logged of each cell, under its id; of a trace only where it is."""
    for cell in cells:
        for file in _files_of(root, cell):
            shown = file.relative_to(root)
            if file.name.endswith(".trace.log"):
                yield f"{cell}: trace for tlparse: {shown}"
                continue
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            yield f"{cell}: {shown}"
            for line in lines[:_MOST_LINES]:
                yield f"  {harmless_text(line)}"
            if not lines:
                yield "  nothing was logged in these channels"
            elif len(lines) > _MOST_LINES:
                yield f"  and {len(lines) - _MOST_LINES} lines more"


def _files_of(root: Path, cell: str) -> list[Path]:
    """A cell's file, and that of each of its ranks."""
    name, found = file_word(cell), []
    for file in sorted(log_folder(root).glob("*.log")):
        whose = file.name.removesuffix(".log").removesuffix(".trace")
        # A rank's has its number behind.
        own, _, rank = whose.rpartition(".rank")
        if name in (whose, own if rank.isdigit() else whose):
            found.append(file)
    return found
