"""Theme: letter and colours of each verdict, of the steps of a number, and of the page; light and dark.

A cell is told apart by letter, by lightness and by hue, in this order, so that colour-blind readers and grey prints
lose nothing. Every text has a contrast of at least 4.5 to its ground (WCAG 2.2, 1.4.3); a test computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["STEPS", "VERDICT_STYLES", "Pair", "VerdictStyle", "contrast", "style_rules", "variables"]


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
    rules = [f":is(.s,.badge).{name}{{background:var(--{name}-ground);color:var(--{name}-text)}}"
             for name in (*VERDICT_STYLES, *steps)]
    return "".join(rules)


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.2, "contrast ratio" and "relative luminance").

    >>> round(contrast("#ffffff", "#000000"))
    21
    """
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    red, green, blue = (_linear_channel(int(colour[start:start + 2], 16) / 255) for start in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear_channel(channel: float) -> float:
    """From sRGB, whose steps look alike, to amounts of light."""
    if channel <= 0.04045:
        return channel / 12.92
    return float(((channel + 0.055) / 1.055) ** 2.4)
