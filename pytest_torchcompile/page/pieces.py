"""Pieces that every part of the page is made of: a verdict, a place in the user's code, a time, a long text cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

from pytest_torchcompile.page.markup import Child, Html, fit, tag
from pytest_torchcompile.page.theme import VERDICT_STYLES

__all__ = ["ROWS", "anchor", "badge", "columns", "cut", "hint", "link", "more", "place", "section"]

ROWS: Final = 40
"""How many rows a table or list of the page has; what is more is counted."""
LETTERS: Final = 6000
"""How much of a text is shown; the report has it whole."""


def anchor(cell: str) -> str:
    """The id of a cell's article."""
    return fit(f"cell:{cell}")


def link(cell: str) -> str:
    """The address of a cell's article within the page."""
    return "#" + quote(anchor(cell), safe=":")


def badge(verdict: str) -> Html:
    """A verdict as a coloured word."""
    return tag("span", verdict, class_=f"badge {verdict}" if verdict in VERDICT_STYLES else "badge")


def place(file: str, line: int, source: str) -> Html:
    """``file:line``; a link if the address of a source file is known (see :func:`..document.page`)."""
    shown = tag("code", f"{file}:{line}" if line else file, class_="place")
    if not source or file.startswith("/") or not line:
        return shown
    return tag("a", shown, href=source.replace("{file}", quote(fit(file))).replace("{line}", str(line)))


def section(title: str, *children: Child) -> Html:
    """A part of an article."""
    return tag("section", tag("h3", title), *children)


def columns(*names: str) -> Html:
    """The head of a table."""
    return tag("thead", tag("tr", *(tag("th", name, scope="col") for name in names)))


def cut(text: str) -> str:
    """The text, but no more of it than a page takes."""
    left = len(text) - LETTERS
    return text if left <= 0 else f"{text[:LETTERS]} … and {left} more characters"


def hint(text: str) -> Html | None:
    """What to try."""
    return tag("p", tag("b", "try "), cut(text), class_="try") if text else None


def more(count: int, shown: int = ROWS) -> Iterable[Html]:
    """How many of `count` are not shown, if any."""
    return [tag("p", f"and {count - shown} more", class_="quiet")] if count > shown else []
