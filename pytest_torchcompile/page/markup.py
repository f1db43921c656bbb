"""Markup: elements of HTML and SVG, whose text is escaped unless it is markup already, and pieces made of them.

No template library: the command line works without torch, so without the jinja2 that torch brings, and a template
escapes only where somebody remembered to ask. Here text and markup are two types, and text is always escaped.

The theme comes first: letter and colours of each verdict, of the steps of a number, and of the page; light and dark.
A cell is told apart by letter, by lightness and by hue, in this order, so that colour-blind readers and grey prints
lose nothing. Every text has a contrast of at least 4.5 to its ground (WCAG 2.2, 1.4.3); a test computes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from pytest_torchcompile.report.safe_output import harmless_text

__all__ = [
    "ROWS", "STEPS", "VERDICT_STYLES", "Child", "Html", "Pair", "VerdictStyle", "again", "anchor", "badge", "columns",
    "contrast", "cut", "data", "fit", "hint", "join", "link", "more_note", "place", "section", "style_rules", "tag",
    "text", "variables",
]


@dataclass(frozen=True)
class Pair:
    """Ground and text, as ``#rrggbb``."""

    ground: str
    text: str


@dataclass(frozen=True)
class VerdictStyle:
    """How a verdict looks and reads."""

    letter: str
    help: str
    light: Pair
    dark: Pair


VERDICT_STYLES: Final[dict[str, VerdictStyle]] = {
    "pass": VerdictStyle("P", "every check holds", Pair("#cfe7db", "#14532d"), Pair("#1d4a38", "#c6efda")),
    "xfail": VerdictStyle("x", "fails, as a rule of the matrix expects",
                          Pair("#f3e2ae", "#574000"), Pair("#54481c", "#f6e5ad")),
    "skip": VerdictStyle("s", "this machine cannot run it", Pair("#e6e6ea", "#52525b"), Pair("#34353d", "#bcbdc8")),
    "not_run": VerdictStyle("?", "planned, but no verdict came",
                            Pair("#f7f7f8", "#52525b"), Pair("#1f2026", "#bcbdc8")),
    "xpass": VerdictStyle("X", "passes, although a rule expects it to fail",
                          Pair("#8a5a00", "#ffffff"), Pair("#e3b657", "#2b1d00")),
    "fail": VerdictStyle("F", "a check does not hold", Pair("#c2410c", "#ffffff"), Pair("#e06c3c", "#1c0a00")),
    "error": VerdictStyle("E", "the matrix, the model or this tool is wrong",
                          Pair("#7e22a8", "#ffffff"), Pair("#d7a2ec", "#2a0a33")),
    "timeout": VerdictStyle("T", "stopped: it took too long", Pair("#1d4ed8", "#ffffff"), Pair("#93b7ff", "#081a3d")),
    "crash": VerdictStyle("C", "its process died", Pair("#18181b", "#ffffff"), Pair("#f4f4f5", "#18181b")),
}
"""In the order of the legend."""


STEPS: Final[tuple[tuple[Pair, Pair], ...]] = (
    (Pair("#eef1f6", "#1f2937"), Pair("#23262e", "#d7dae3")),
    (Pair("#cfdcef", "#1f2937"), Pair("#263c5e", "#dbe6fa")),
    (Pair("#a5bfe4", "#111827"), Pair("#2f5a97", "#ffffff")),
    (Pair("#6f97d1", "#0b1220"), Pair("#7aa7ec", "#0b1220")),
    (Pair("#2f5fae", "#ffffff"), Pair("#a9c8fb", "#0b1220")),
    (Pair("#173a78", "#ffffff"), Pair("#e3eeff", "#0b1220")),
)
"""From least to most: (light, dark)."""

_PAGE: Final[dict[str, tuple[str, str]]] = {
    "ground": ("#fbfbfa", "#141519"),
    "panel": ("#ffffff", "#1b1d22"),
    "text": ("#1c1d21", "#e6e7ec"),
    "quiet": ("#5c5e68", "#a2a4b0"),
    "line": ("#dedfe3", "#32343c"),
    "accent": ("#1d4ed8", "#93b7ff"),
    "code": ("#f2f2f0", "#23252b"),
    "bad": ("#b23a0b", "#ff9c70"),
    "good": ("#17643b", "#8fdcb4"),
}


def variables(dark: bool) -> dict[str, str]:
    """Every colour of one theme by the name that the style sheet knows it by, without the ``--``."""
    # Each pair is (light, dark), so the truth is its index.
    colours = {name: pair[dark] for name, pair in _PAGE.items()}
    for name, style in VERDICT_STYLES.items():
        pair = style.dark if dark else style.light
        colours |= {f"{name}-ground": pair.ground, f"{name}-text": pair.text}
    for number, step in enumerate(STEPS):
        colours |= {f"step{number}-ground": step[dark].ground, f"step{number}-text": step[dark].text}
    return colours


def style_rules() -> str:
    """CSS rules that give squares and badges their ground and text, by their class."""
    steps = [f"step{number}" for number in range(len(STEPS))]
    rules = []
    for name in (*VERDICT_STYLES, *steps):
        rules.append(f":is(.s,.badge).{name}{{background:var(--{name}-ground);color:var(--{name}-text)}}")
    return "".join(rules)


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.2, "contrast ratio" and "relative luminance").

    >>> round(contrast("#ffffff", "#000000"))
    21
    """
    # The contrast ratio of WCAG 2: 0.05 stands for the light that a room throws on the screen.
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    red, green, blue = (_linear_channel(int(colour[start:start + 2], 16) / 255) for start in (1, 3, 5))
    # Weights of ITU-R BT.709: the eye sees green brightest and blue darkest.
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear_channel(channel: float) -> float:
    """From sRGB, whose steps look alike, to amounts of light."""
    # Constants of IEC 61966-2-1, which defines sRGB: straight near black, a power law above.
    if channel <= 0.04045:
        return channel / 12.92
    return float(((channel + 0.055) / 1.055) ** 2.4)


# --------------------------------------------------------------------------------------------------------- the elements
ROWS: Final = 40
"""How many rows a table or list of the page has; what is more is counted."""
LETTERS: Final = 6000
"""How much of a text is shown; the report has it whole."""
_VOID: Final = frozenset({"br", "hr", "input", "line", "link", "meta", "rect"})
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
        # `class` is a keyword of Python, and no keyword argument has a hyphen.
        word = key.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(f" {word}")
        elif value is not None and value is not False:
            parts.append(f' {word}="{text(value)}"')
    # With a slash, so that the same element is right in SVG, which is XML.
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
    """What to try; lines after the first are something to paste."""
    if not text:
        return None
    first, _, rest = cut(text).partition("\n")
    pasted = tag("pre", rest) if rest.strip() else None
    return tag("div", tag("p", tag("b", "try "), _with_code(first)), pasted, class_="try")


def _with_code(text: str) -> list[Html | str]:
    """What stands between backticks as code; all of it as it is where one is left over."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return [text]
    # What is between two backticks has an odd number.
    mixed: list[Html | str] = list(parts)
    mixed[1::2] = [tag("code", part) for part in parts[1::2]]
    return mixed


def again(command: str) -> Html | None:
    """The command that runs it again, to be copied."""
    if not command:
        return None
    button = tag("button", "copy", type="button", class_="js copy")
    return tag("p", "again ", tag("code", command), " ", button, class_="again")


def more_note(count: int, shown: int = ROWS) -> Html | None:
    """How many of `count` are not shown, if any."""
    if count <= shown:
        return None
    return tag("p", f"and {count - shown} more", class_="quiet")
