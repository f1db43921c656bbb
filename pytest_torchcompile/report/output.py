"""Output files of the commands: written whole or not at all, and never over a file that somebody else wrote.

Each file ends with a line that says who wrote it, a comment in Markdown, HTML, SVG and XML alike. A file without that
line is a user's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.report.files import replace

__all__ = ["WRITTEN_BY", "write"]

WRITTEN_BY: Final = "<!-- written by pytest-torchcompile -->"


def write(path: str | Path, text: str, *, force: bool = False) -> None:
    """Write a file, its folder too if need be.

    Raises UsageError where that cannot be done, and for a file that is there and not ours, unless ``force``.
    """
    file = Path(path)
    try:
        if not force:
            _refuse_others(file)
        replace(file, f"{text.rstrip()}\n{WRITTEN_BY}\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None


def _refuse_others(file: Path) -> None:
    if not file.exists() or file.is_dir():  # a folder has an error of its own
        return
    if not file.is_file():
        raise UsageError(f"{file}: is no regular file, so it is not replaced; name another file")
    text = file.read_text(encoding="utf-8", errors="replace")
    if text.strip() and WRITTEN_BY not in text.splitlines():
        raise UsageError(f"{file}: was not written by pytest-torchcompile, so it is not replaced; name another file, "
                         "or replace it by --force")
