"""Markup: elements of HTML and SVG, whose text is escaped unless it is markup already.

No template library: the command line works without torch, so without the jinja2 that torch brings, and a template
escapes only where somebody remembered to ask. Here text and markup are two types, and text is always escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from typing import Any, Final, TypeAlias

from pytest_torchcompile.report.harmless import harmless_text

__all__ = ["Child", "Html", "data", "fit", "join", "tag", "text"]

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
    if _PLAIN.fullmatch(shown) and "::" not in shown and "##" not in shown:
        return Html(shown)
    return Html(escape(fit(shown), quote=True))


def fit(text: str) -> str:
    """The text with what no page can hold as U+FFFD, and nothing that a terminal or a CI log would obey."""
    return _UNFIT.sub("\ufffd", harmless_text(text))


def join(*children: Child) -> Html:
    """Children one after the other; None is nothing."""
    parts: list[str] = []
    _flatten(children, parts)
    return Html("".join(parts))


def _flatten(children: Iterable[Child], parts: list[str]) -> None:
    for child in children:
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, (str, int, float)):
            parts.append(text(child))
        elif child is not None:
            _flatten(child, parts)


def tag(name: str, /, *children: Child, **attributes: Any) -> Html:
    """Make an element. ``class_`` becomes ``class``, ``aria_label`` ``aria-label``; None and False leave one out.

    >>> tag("a", "x < y", href="#1", hidden=True, title=None)
    '<a href="#1" hidden>x &lt; y</a>'
    """
    parts = ["<", name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            word = key.rstrip("_").replace("_", "-")
            parts.append(f" {word}" if value is True else f' {word}="{text(value)}"')
    if name in _VOID:
        parts.append("/>")
    else:
        parts.append(">")
        _flatten(children, parts)
        parts.append(f"</{name}>")
    return Html("".join(parts))


def data(content: Any) -> Html:
    """JSON for a script element: nothing in it can end the element, or begin a comment, or a command of a CI log.

    :raises ValueError: the content has NaN or infinity, which are no JSON.
    """
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace("##", "#\\u0023"))
