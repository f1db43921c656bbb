"""What README and the pages of docs hold: fenced blocks, files, commands and links, for the tests that read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "DOCS", "PAGES", "README", "ROOT", "blocks", "command_lines", "files_of", "links_of", "scripts_of", "text_of",
]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = (README, *sorted(DOCS.rglob("*.md")))

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"^`([\w./]+\.(?:py|yaml))`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def text_of(path: Path) -> str:
    """The page's Markdown."""
    return path.read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language; of none: ``""``."""
    return [body for name, body in _FENCED.findall(text) if name == language]


def files_of(path: Path) -> dict[str, str]:
    """The files that a page shows, each under its name."""
    return dict(_FILE.findall(text_of(path)))


def scripts_of(path: Path) -> list[str]:
    """The blocks of Python that are no file: they run as they stand."""
    files = set(files_of(path).values())
    return [body for body in blocks(text_of(path), "python") if body not in files]


def command_lines(path: Path) -> Iterator[str]:
    """The commands in blocks without a language, without their comments."""
    for body in blocks(text_of(path), ""):
        for line in body.replace("\\\n", " ").splitlines():
            if re.match(r"(pytest|pytest-torchcompile|tox|pip|python) ", line):
                # Two blanks or more, or a hash, end a command: what follows says what it does.
                yield re.split(r"\s{2,}|\s#\s", line)[0].strip()


def links_of(path: Path) -> list[str]:
    """Where the page's links point to, code left out."""
    prose = _FENCED.sub("", text_of(path))
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", prose))
