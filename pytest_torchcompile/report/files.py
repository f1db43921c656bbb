"""Files that a run or a command writes: whole or not at all, and never over a file that somebody else wrote.

What a run leaves lies in a folder that git does not see. An output file of a command ends with a line that says who
wrote it, a comment in Markdown, HTML, SVG and XML alike. A file without that line is a user's own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from pytest_torchcompile.errors import UsageError

__all__ = ["FOLDER", "JOURNAL_FILE", "PART_FILE", "PREVIOUS", "REPORT_FILE", "REPRODUCTIONS", "WRITTEN_BY",
           "behind_link", "make_folder", "replace_file", "write_output"]

FOLDER: Final = ".compile-matrix"
REPORT_FILE: Final = f"{FOLDER}/report.json"
JOURNAL_FILE: Final = f"{FOLDER}/journal.jsonl"
REPRODUCTIONS: Final = f"{FOLDER}/repro"
"""Where a failed cell's file is written."""
PREVIOUS: Final = f"{FOLDER}/previous"
"""Where the report before is kept."""
PART_FILE: Final = f"{FOLDER}/part/report.json"
"""The record of the last run that judged only a part of the matrix."""


def behind_link(path: Path) -> Path:
    """The file itself, where the path is a link: what we write belongs to where the link points."""
    if not path.is_symlink():
        return path
    return Path(os.path.realpath(path))


def replace_file(path: Path, text: str) -> None:
    """Write the file whole or not at all: a reader beside us, or a kill, must not find half of it."""
    path = behind_link(path)
    make_folder(path.parent)
    # In the same folder, because only within one disk a rename is done at once.
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder; one in ``.compile-matrix`` gets the line that hides all of that from git."""
    folder.mkdir(parents=True, exist_ok=True)
    for ours in (folder, *folder.parents):
        if ours.name == FOLDER:
            ignore = ours / ".gitignore"
            # A user's own stays.
            if not ignore.exists():
                ignore.write_text("*\n", encoding="ascii")
            return


WRITTEN_BY: Final = "<!-- written by pytest-torchcompile -->"


def write_output(path: str | Path, text: str, *, force: bool = False) -> None:
    """Write a file, its folder too if need be.

    Raises UsageError where that cannot be done, and for a file that is there and not ours, unless ``force``.
    """
    file = Path(path)
    try:
        if not force:
            _refuse_others(file)
        replace_file(file, f"{text.rstrip()}\n{WRITTEN_BY}\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None


def _refuse_others(file: Path) -> None:
    # A folder has an error of its own when it is written.
    if not file.exists() or file.is_dir():
        return
    if not file.is_file():
        raise UsageError(f"{file}: is no regular file, so it is not replaced; name another file")
    text = file.read_text(encoding="utf-8", errors="replace")
    if text.strip() and WRITTEN_BY not in text.splitlines():
        raise UsageError(f"{file}: was not written by pytest-torchcompile, so it is not replaced; name another file, "
                         "or replace it by --force")
