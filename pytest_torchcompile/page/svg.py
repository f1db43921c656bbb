"""The heat map alone as SVG, for a README or a pull request's comment: one file, no script, light and dark.

There is no PNG: it would take an image library or a browser. A browser makes one of the SVG
(``chromium --headless --screenshot=map.png map.svg``).
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from pytest_torchcompile.gate.announcement import run_facts, sentence
from pytest_torchcompile.gate.gate import GateOutcome
from pytest_torchcompile.page.heatmap import Band, HeatMap, cell_in_words
from pytest_torchcompile.page.markup import VERDICT_STYLES, Html, join, tag, variables

__all__ = ["svg"]

# Pixels. What a picture shows does not scroll, so everything has to be small.
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


@dataclass(frozen=True)
class Lane:
    """One row or one column of squares, and where it lies."""

    value: str
    part: tuple[str, ...]
    label: str
    starts_band: bool
    start: float = 0.0

    @property
    def key(self) -> tuple[str, ...]:
        """As :attr:`~pytest_torchcompile.page.heatmap.Grid.places` has it."""
        return (self.value, *self.part)


@dataclass(frozen=True)
class Picture:
    """A part of the picture, and how far it reaches."""

    content: Html
    width: float
    height: float


def svg(outcome: GateOutcome) -> str:
    """The picture of a run: the gate's sentence, the map, the legend."""
    heat = HeatMap(outcome.facts)
    table = _map_picture(heat)
    # A map of two cells would leave no room for the sentence.
    width = max(table.width, 520.0)
    # The sentence is set larger than the rest, hence a quarter more for each letter.
    lines = textwrap.wrap(sentence(outcome), int((width - 2 * MARGIN) / (LETTER * 1.25))) or [""]
    head = [_text(MARGIN, MARGIN + LINE * (number + 1), line, "head") for number, line in enumerate(lines[:4])]
    top = MARGIN + LINE * (len(head) + 1)
    about = textwrap.shorten(run_facts(outcome), int((width - 2 * MARGIN) / LETTER), placeholder=" …")
    legend = _legend_picture(heat, width, top + LINE + table.height)
    return tag(
        "svg", tag("title", sentence(outcome)), tag("style", _style_sheet()),
        tag("rect", width="100%", height="100%", class_="page"), head, _text(MARGIN, top, about, "quiet"),
        tag("g", table.content, transform=f"translate({MARGIN} {top + LINE})"), legend.content,
        xmlns="http://www.w3.org/2000/svg", width=f"{width:.0f}", height=f"{legend.height:.0f}",
        viewBox=f"0 0 {width:.0f} {legend.height:.0f}", role="img", font_family="system-ui,sans-serif",
    ) + "\n"  # fmt: skip


def _map_picture(heat: HeatMap) -> Picture:
    grid = heat.grid
    rows, columns = _lanes_of(grid.rows), _lanes_of(grid.columns)
    # Left of the squares stand the bands' names, then the rows'; above them the bands' names, then the columns'.
    bands_width = LETTER * _longest_label([lane.value for lane in rows]) + GAP
    left = bands_width + LETTER * _longest_label([lane.label for lane in rows]) + GAP / 2
    labels_bottom = LINE + LETTER * _longest_label([lane.label for lane in columns])
    columns, rows = _place_lanes(columns, left), _place_lanes(rows, labels_bottom + 6)
    parts = []
    for column in columns:
        if column.starts_band:
            parts.append(_text(column.start, LINE - 6, _cut_label(column.value)))
        # A label of a column is turned, so that columns stay as narrow as a square.
        turned = f"translate({column.start + SQUARE / 2 + 4:.1f} {labels_bottom}) rotate(-90)"
        parts.append(tag("text", _cut_label(column.label), class_="quiet", transform=turned))
    for row in rows:
        if row.starts_band:
            parts.append(_text(0, row.start + 14, _cut_label(row.value)))
        parts.append(_text(bands_width, row.start + 14, _cut_label(row.label), "quiet"))
    for row in rows:
        for column in columns:
            for cell in grid.places.get((row.key, column.key), ()):
                parts.append(_square(heat, cell, column.start, row.start))
    right = columns[-1].start if columns else 0.0
    bottom = rows[-1].start if rows else 0.0
    return Picture(join(parts), right + PITCH + 2 * MARGIN, bottom + PITCH + GAP)


def _lanes_of(bands: Sequence[Band]) -> list[Lane]:
    lanes = []
    for band in bands:
        for number, (part, label) in enumerate(zip(band.parts, band.labels, strict=True)):
            lanes.append(Lane(band.value, part, label, starts_band=number == 0))
    return lanes


def _place_lanes(lanes: Sequence[Lane], start: float) -> list[Lane]:
    """One after the other, with a gap before each band but the first."""
    placed: list[Lane] = []
    for lane in lanes:
        if placed and lane.starts_band:
            start += GAP
        placed.append(replace(lane, start=start))
        start += PITCH
    return placed


def _longest_label(labels: Sequence[str]) -> int:
    return max((len(_cut_label(label)) for label in labels), default=0)


def _cut_label(label: str) -> str:
    return label if len(label) <= LONGEST else f"{label[:LONGEST - 1]}…"


def _text(x: float, y: float, text: str, kind: str | None = None) -> Html:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", class_=kind)


def _square(heat: HeatMap, cell: int, x: float, y: float) -> Html:
    facts = heat.cells[cell]
    return tag("g", tag("title", cell_in_words(facts)), _box(facts.status, x, y))


def _box(verdict: str, x: float, y: float) -> Html:
    style = VERDICT_STYLES.get(verdict)
    return join(
        tag("rect", x=f"{x:.1f}", y=f"{y:.1f}", width=SQUARE, height=SQUARE, rx=3, class_=f"{verdict}-ground"),
        tag("text", style.letter if style else "?", x=f"{x + SQUARE / 2:.1f}", y=f"{y + 14:.1f}",
            class_=f"letter {verdict}-text"),
    )  # fmt: skip


def _legend_picture(heat: HeatMap, width: float, top: float) -> Picture:
    """The verdicts that there are; its height is where the picture ends."""
    counts = Counter(cell.status for cell in heat.cells)
    parts, x = [], float(MARGIN)
    for name in VERDICT_STYLES:
        if not counts[name]:
            continue
        label = f"{name} {counts[name]}"
        if x + SQUARE + 6 + LETTER * len(label) > width - MARGIN:
            # What has no room goes to the next line.
            x, top = float(MARGIN), top + PITCH + 4
        parts += [_box(name, x, top), _text(x + SQUARE + 6, top + 14, label)]
        x += SQUARE + 6 + LETTER * len(label) + 18
    return Picture(join(parts), width, top + PITCH + MARGIN)


def _style_sheet() -> Html:
    return Html(f"text{{font:{FONT}}}.head{{font-size:14px;font-weight:600}}"
                ".letter{font-weight:600;text-anchor:middle}"
                f"{_theme_rules(dark=False)}@media(prefers-color-scheme:dark){{{_theme_rules(dark=True)}}}")


def _theme_rules(dark: bool) -> str:
    colours = variables(dark)
    rules = [f"text{{fill:{colours['text']}}}", f".quiet{{fill:{colours['quiet']}}}",
             f".page{{fill:{colours['ground']}}}", f".not_run-ground{{stroke:{colours['quiet']}}}"]
    for name, colour in colours.items():
        # The picture shows verdicts alone, and no steps of a number.
        if name.endswith(("-ground", "-text")) and not name.startswith("step"):
            rules.append(f".{name}{{fill:{colour}}}")
    return "".join(rules)
