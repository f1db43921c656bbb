"""The heat map alone as SVG, for a README or a pull request's comment: one file, no script, light and dark.

There is no PNG: it would take an image library or a browser. A browser makes one of the SVG
(``chromium --headless --screenshot=map.png map.svg``).
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Final

from pytest_torchcompile.gate.announcement import run_facts, sentence
from pytest_torchcompile.gate.gate import GateOutcome
from pytest_torchcompile.page.heatmap import HeatMap, told
from pytest_torchcompile.page.markup import Html, join, tag
from pytest_torchcompile.page.theme import VERDICT_STYLES, variables

__all__ = ["svg"]

SQUARE: Final = 20
PITCH: Final = 22
GAP: Final = 12
"""Between bands."""
LINE: Final = 18
MARGIN: Final = 16
LETTER: Final = 7.0
"""Width of a letter of 12 pixels, about: the reader's font is not known."""
LONGEST: Final = 38
"""Letters of a label; what is longer is cut."""
FONT: Final = "12px system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',sans-serif"


def svg(outcome: GateOutcome) -> str:
    """The picture of a run: the gate's sentence, the map, the legend."""
    heat = HeatMap(outcome.facts)
    body, width, height = _map(heat)
    width = max(width, 520.0)
    lines = textwrap.wrap(sentence(outcome), int((width - 2 * MARGIN) / (LETTER * 1.25))) or [""]
    head = [_text(MARGIN, MARGIN + LINE * (i + 1), line, "head") for i, line in enumerate(lines[:4])]
    top = MARGIN + LINE * (len(head) + 1)
    about = textwrap.shorten(run_facts(outcome), int((width - 2 * MARGIN) / LETTER), placeholder=" …")
    legend, bottom = _legend(heat, width, top + LINE + height)
    return tag(
        "svg", tag("title", sentence(outcome)), tag("style", _style()),
        tag("rect", width="100%", height="100%", class_="page"), *head, _text(MARGIN, top, about, "quiet"),
        tag("g", body, transform=f"translate({MARGIN} {top + LINE})"), legend,
        xmlns="http://www.w3.org/2000/svg", width=f"{width:.0f}", height=f"{bottom:.0f}",
        viewBox=f"0 0 {width:.0f} {bottom:.0f}", role="img", font_family="system-ui,sans-serif",
    ) + "\n"  # fmt: skip


def _map(heat: HeatMap) -> tuple[Html, float, float]:
    """The table, its width and its height."""
    grid = heat.grid
    columns = [(band.value, part, label, i) for band in grid.columns
               for i, (part, label) in enumerate(zip(band.parts, band.labels, strict=True))]
    rows = [(band.value, part, label, i) for band in grid.rows
            for i, (part, label) in enumerate(zip(band.parts, band.labels, strict=True))]
    bands = LETTER * max((len(_short(value)) for value, *_ in rows), default=0) + GAP
    left = bands + LETTER * max((len(_short(label)) for _, _, label, _ in rows), default=0) + GAP / 2
    deep = LETTER * max((len(_short(label)) for _, _, label, _ in columns), default=0)
    xs = list(_offsets(left, [i for *_, i in columns]))
    ys = list(_offsets(LINE + deep + 6, [i for *_, i in rows]))
    parts = []
    for x, (value, _, label, i) in zip(xs, columns, strict=True):
        if i == 0:
            parts.append(_text(x, LINE - 6, _short(value)))
        parts.append(tag("text", _short(label), class_="quiet",
                         transform=f"translate({x + SQUARE / 2 + 4:.1f} {LINE + deep}) rotate(-90)"))
    for y, (value, _, label, i) in zip(ys, rows, strict=True):
        if i == 0:
            parts.append(_text(0, y + 14, _short(value)))
        parts.append(_text(bands, y + 14, _short(label), "quiet"))
    for y, (row, part, _, _) in zip(ys, rows, strict=True):
        for x, (column, other, _, _) in zip(xs, columns, strict=True):
            parts += [_square(heat, cell, x, y) for cell in grid.places.get(((row, *part), (column, *other)), ())]
    return join(*parts), (xs or [0.0])[-1] + PITCH + 2 * MARGIN, (ys or [0.0])[-1] + PITCH + GAP


def _offsets(start: float, numbers: list[int]) -> Iterator[float]:
    at = start - PITCH
    for position, number in enumerate(numbers):
        at += PITCH + (GAP if number == 0 and position else 0)
        yield at


def _short(label: str) -> str:
    return label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"


def _text(x: float, y: float, text: str, kind: str | None = None) -> Html:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", class_=kind)


def _square(heat: HeatMap, cell: int, x: float, y: float) -> Html:
    facts = heat.cells[cell]
    return tag("g", tag("title", told(facts)), _box(facts.status, x, y))


def _box(verdict: str, x: float, y: float) -> Html:
    style = VERDICT_STYLES.get(verdict)
    return join(
        tag("rect", x=f"{x:.1f}", y=f"{y:.1f}", width=SQUARE, height=SQUARE, rx=3, class_=f"{verdict}-ground"),
        tag("text", style.letter if style else "?", x=f"{x + SQUARE / 2:.1f}", y=f"{y + 14:.1f}",
            class_=f"letter {verdict}-text"),
    )  # fmt: skip


def _legend(heat: HeatMap, width: float, top: float) -> tuple[Html, float]:
    """The verdicts that there are, and where the picture ends."""
    counts = Counter(cell.status for cell in heat.cells)
    parts, x = [], float(MARGIN)
    for name in VERDICT_STYLES:
        if counts[name]:
            label = f"{name} {counts[name]}"
            if x + SQUARE + 6 + LETTER * len(label) > width - MARGIN:
                x, top = float(MARGIN), top + PITCH + 4
            parts += [_box(name, x, top), _text(x + SQUARE + 6, top + 14, label)]
            x += SQUARE + 6 + LETTER * len(label) + 18
    return join(*parts), top + PITCH + MARGIN


def _style() -> Html:
    def theme(dark: bool) -> str:
        colours = variables(dark)
        rules = [f".{name}{{fill:{colours[name]}}}" for name in colours
                 if name.endswith(("-ground", "-text")) and not name.startswith("step")]
        return "".join((f"text{{fill:{colours['text']}}}", f".quiet{{fill:{colours['quiet']}}}",
                        f".page{{fill:{colours['ground']}}}", f".not_run-ground{{stroke:{colours['quiet']}}}", *rules))

    return Html(f"text{{font:{FONT}}}.head{{font-size:14px;font-weight:600}}"
                ".letter{font-weight:600;text-anchor:middle}"
                f"{theme(False)}@media(prefers-color-scheme:dark){{{theme(True)}}}")  # fmt: skip
