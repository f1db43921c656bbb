"""Output that does no harm: files that a run or a command writes, and text of strangers that is shown.

Files are written whole or not at all, and never over a file that somebody else wrote. What a run leaves lies in a
folder that git does not see. An output file of a command ends with a line that says who wrote it, a comment in the
language of the file. A file without that line is a user's own; so is Python or YAML of ours that was edited, which a
checksum in the line tells.

Text that a model or torch wrote is shown, and never obeyed by a terminal or a CI log. A terminal obeys control
characters. GitHub's runner obeys a line of a log that begins with ``::``, after any white space, and ``##[...]``
anywhere in it; Azure's ``##vso[...]`` and TeamCity's ``##teamcity[...]`` are alike.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Final

from pytest_torchcompile.bounded_folder import beside_place
from pytest_torchcompile.errors import UsageError

__all__ = [
    "CODE", "FOLDER", "JOURNAL_FILE", "LOGS", "MODEL_FOLDER", "MODEL_REPORT", "OUR_COMMENT", "PART_FILE", "PREVIOUS",
    "REPORT_FILE", "REPRODUCTIONS", "REUSED", "WRITTEN_BY", "behind_link", "harmless_text", "make_folder",
    "refuse_others", "replace_file", "write_output",
]

FOLDER: Final = ".compile-matrix"
MODEL_FOLDER: Final = f"{FOLDER}/model"
"""Where a run with --compile-model has its files, apart from those of the repository's matrix."""
REPORT_FILE: Final = f"{FOLDER}/report.json"
JOURNAL_FILE: Final = f"{FOLDER}/journal.jsonl"
MODEL_REPORT: Final = f"{MODEL_FOLDER}/report.json"
REPRODUCTIONS: Final = f"{FOLDER}/repro"
"""Where a failed cell's file is written."""
PREVIOUS: Final = f"{FOLDER}/previous"
"""Where the report before is kept."""
CODE: Final = "code"
"""Where, beside a report, the code of its graphs and kernels is kept."""
REUSED: Final = f"{FOLDER}/reuse"
"""Where results are kept for --compile-reuse."""
LOGS: Final = f"{FOLDER}/logs"
"""Where torch's log of each cell is kept for --compile-logs."""
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
    beside = beside_place(path)
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


_WORDS: Final = "written by pytest-torchcompile"
OUR_COMMENT: Final = f"# {_WORDS}"
"""How our line begins in Python and YAML."""
_IN_MARKUP: Final = f"<!-- {_WORDS}"
"""How our line begins in Markdown, HTML and SVG."""
WRITTEN_BY: Final = f"{_IN_MARKUP} -->"
_SCRIPTS: Final = (".py", ".yaml", ".yml")
_EDITED_BY_HAND: Final = (*_SCRIPTS, ".md")
"""Files that people edit: our line has a checksum of the text above it."""


def write_output(path: str | Path, text: str, *, force: bool = False) -> None:
    """Write a file, its folder too if need be.

    Raises UsageError where that cannot be done, and for a file that is there and not ours, unless ``force``.
    """
    file = Path(path)
    if not force:
        refuse_others(file)
    try:
        replace_file(file, _with_our_line(file, text.rstrip()))
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None


def refuse_others(file: Path, advice: str = "name another file, or replace it by --force") -> None:
    """Raise UsageError for a file that is there and not ours, or can't be read; ``advice``: what may be done then."""
    # A folder has an error of its own when it is written.
    if not file.exists() or file.is_dir():
        return
    if not file.is_file():
        raise UsageError(f"{file}: is no regular file, so it is not replaced; name another file")
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror or error}") from None
    if not text.strip():
        return
    lines = text.splitlines()
    if not any(_WORDS in line and line.startswith(_comment_of(file)) for line in lines):
        raise UsageError(f"{file}: was not written by pytest-torchcompile, so it is not replaced; {advice}")
    above, _, last = text.rstrip().rpartition("\n")
    # Markdown had no checksum in earlier versions.
    if file.suffix in _EDITED_BY_HAND and last not in (_last_line(file, above), WRITTEN_BY):
        raise UsageError(f"{file}: was edited since pytest-torchcompile wrote it, so it is not replaced; {advice}")


def _comment_of(file: Path) -> str:
    """How our line begins."""
    if file.suffix in _SCRIPTS:
        return OUR_COMMENT
    if file.suffix == ".json":
        return _JSON_LINE
    return _IN_MARKUP


_JSON_LINE: Final = f'{{"$comment": "{_WORDS}",'
"""JSON has no comments: our line is the first of the text, with a key of its own."""


def _with_our_line(file: Path, text: str) -> str:
    if file.suffix == ".json":
        return f"{_JSON_LINE}\n{text.removeprefix('{').lstrip()}\n"
    return f"{text}\n{_last_line(file, text)}\n"


def _last_line(file: Path, text: str) -> str:
    """Our line; that of a file to be edited has a checksum of the text above it."""
    if file.suffix in _EDITED_BY_HAND:
        checksum = hashlib.sha256(text.encode()).hexdigest()[:12]
        words = f"{_comment_of(file)}, {checksum}: without this line, or edited, the file is yours"
        return f"{words} -->" if file.suffix == ".md" else words
    return WRITTEN_BY


# ---------------------------------------------------------------------------------------------------- text of strangers
_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")
_LINE_END: Final = re.compile(r"\r\n?")
"""GitHub's runner takes a lone carriage return for the end of a line too."""
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters less tab and newline, and those that turn the direction of what is shown."""
_COMMAND: Final = re.compile(r"^(\s*):(?=:)", re.MULTILINE)
_COMMAND_IN_BRACKETS: Final = re.compile(r"##(?=\w*\[)")
_SUSPECT: Final = re.compile(f"{_CONTROL.pattern}|::|##")


def harmless_text(text: str) -> str:
    r"""The text without colours, with control characters as U+FFFD, and with no line that is a CI command.

    >>> harmless_text("\x1b[31mred\x1b[0m \x07")
    'red \ufffd'
    >>> harmless_text("  ::error::never shown as one")
    '  : :error::never shown as one'
    >>> harmless_text("a ##[group] of tests")
    'a ## [group] of tests'
    """
    # Most texts have nothing of the kind, and a report has hundreds of thousands.
    if _SUSPECT.search(text) is None:
        return text
    # Colours go first: what is left of them without their control character would be shown as text.
    text = _LINE_END.sub("\n", _COLOUR.sub("", text))
    text = _CONTROL.sub("\ufffd", text)
    text = _COMMAND.sub(r"\1: ", text)
    return _COMMAND_IN_BRACKETS.sub("## ", text)
