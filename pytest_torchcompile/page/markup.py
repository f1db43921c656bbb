"""Markup: elements of HTML and SVG, whose text is escaped unless it is markup already, and pieces made of them.

No template library: the command line works without torch, so without the jinja2 that torch brings, and a template
escapes only where somebody remembered to ask. Here text and markup are two types, and text is always escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from pytest_torchcompile.page.theme import VERDICT_STYLES
from pytest_torchcompile.report.harmless import harmless_text

__all__ = ["ROWS", "Child", "Html", "anchor", "badge", "columns", "cut", "data", "fit", "hint", "join", "link",
           "more_note", "place", "section", "tag", "text"]

ROWS: Final = 40
"""How many rows a table or list of the page has; what is more is counted."""
LETTERS: Final = 6000
"""How much of a text is shown; the report has it whole."""
_VOID: Final = frozenset({"br", "hr", "input", "link", "meta", "rect"})
_UNFIT: Final = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 (section 2.2) and UTF-8 do not take: control characters, lone surrogates."""
_PLAIN: Final = re.compile("[\x20-\x21\x23-\x25\x28-\x3b=\x3f-\x7e]*")
"""Text that is its own escape; most is, so that nothing else is looked for."""


class Html(str):
    """Text that is markup: it goes into a page as it is."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Iterable[Child] | None"


def text(given: object) -> Html:
    """Escape for use as text or as an attribute's value; what no page can hold is shown as U+FFFD.

    >>> text('<script>"')
    '&lt;script&gt;&quot;'
    """
    if isinstance(given, Html):
        return given
    shown = str(given)
    # `::` and `##` begin commands of CI logs, which `fit` takes apart.
    if _PLAIN.fullmatch(shown) and "::" not in shown and "##" not in shown:
        return Html(shown)
    return Html(escape(fit(shown), quote=True))


def fit(text: str) -> str:
    """The text with what no page can hold as U+FFFD, and nothing that a terminal or a CI log would obey."""
    return _UNFIT.sub("\ufffd", harmless_text(text))


def join(*children: Child) -> Html:
    """Children one after the other; None is nothing."""
    parts: list[str] = []
    _flatten_into(children, parts)
    return Html("".join(parts))


def _flatten_into(children: Iterable[Child], parts: list[str]) -> None:
    for child in children:
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, (str, int, float)):
            parts.append(text(child))
        elif child is not None:
            _flatten_into(child, parts)


def tag(name: str, /, *children: Child, **attributes: Any) -> Html:
    """Make an element. ``class_`` becomes ``class``, ``aria_label`` ``aria-label``; None and False leave one out.

    >>> tag("a", "x < y", href="#1", hidden=True, title=None)
    '<a href="#1" hidden>x &lt; y</a>'
    """
    parts = ["<", name]
    for key, value in attributes.items():
        word = key.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(f" {word}")
        elif value is not None and value is not False:
            parts.append(f' {word}="{text(value)}"')
    if name in _VOID:
        parts.append("/>")
    else:
        parts.append(">")
        _flatten_into(children, parts)
        parts.append(f"</{name}>")
    return Html("".join(parts))


def data(content: Any) -> Html:
    """JSON for a script element: nothing in it can end the element, or begin a comment, or a command of a CI log.

    :raises ValueError: the content has NaN or infinity, which are no JSON.
    """
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace("##", "#\\u0023"))


# pieces that every part of the page is made of


def anchor(cell: str) -> str:
    """The id of a cell's article."""
    return fit(f"cell:{cell}")


def link(cell: str) -> str:
    """The address of a cell's article within the page."""
    return "#" + quote(anchor(cell), safe=":")


def badge(verdict: str) -> Html:
    """A verdict as a coloured word."""
    known = verdict in VERDICT_STYLES
    return tag("span", verdict, class_=f"badge {verdict}" if known else "badge")


def place(file: str, line: int, source: str) -> Html:
    """``file:line``; a link if the address of a source file is known (see :func:`..document.page`)."""
    shown = tag("code", f"{file}:{line}" if line else file, class_="place")
    # An absolute path is no file of the repository that the address is of.
    if not source or file.startswith("/") or not line:
        return shown
    return tag("a", shown, href=source.replace("{file}", quote(fit(file))).replace("{line}", str(line)))


def section(title: str, *children: Child) -> Html:
    """A part of an article."""
    return tag("section", tag("h3", title), *children)


def columns(*names: str) -> Html:
    """The head of a table."""
    return tag("thead", tag("tr", [tag("th", name, scope="col") for name in names]))


def cut(text: str) -> str:
    """The text, but no more of it than a page takes."""
    if len(text) <= LETTERS:
        return text
    return f"{text[:LETTERS]} … and {len(text) - LETTERS} more characters"


def hint(text: str) -> Html | None:
    """What to try."""
    if not text:
        return None
    return tag("p", tag("b", "try "), cut(text), class_="try")


def more_note(count: int, shown: int = ROWS) -> Html | None:
    """How many of `count` are not shown, if any."""
    if count <= shown:
        return None
    return tag("p", f"and {count - shown} more", class_="quiet")
