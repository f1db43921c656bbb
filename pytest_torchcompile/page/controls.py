"""Controls: the legend, and with JavaScript what the map shows and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pytest_torchcompile.page.baseline_cells import MARKS
from pytest_torchcompile.page.markup import Html, tag
from pytest_torchcompile.page.theme import STEPS, VERDICT_STYLES
from pytest_torchcompile.report.facts import Facts

__all__ = ["controls"]


def controls(cells: Sequence[Facts], numbers: Iterable[str], marks: Mapping[str, str]) -> Html:
    """Two lines. ``numbers``: what the map can be coloured by; ``marks``: cell to its mark against a baseline."""
    checks = dict.fromkeys(verdict.check for cell in cells for verdict in cell.verdicts)
    choices = [tag("option", "verdict", value=""),
               tag("optgroup", *(tag("option", name, value=f"check {name}") for name in checks), label="one check"),
               tag("optgroup", *(tag("option", name, value=f"number {name}") for name in numbers), label="a number")]
    ramp = tag("span", tag("span", id="least"), " ",
               tag("span", *(tag("span", " ", class_=f"s step{i}") for i in range(len(STEPS))), class_="ramp"), " ",
               tag("span", id="most"), id="ramp", hidden=True)
    search = tag("input", type="search", id="search", placeholder="cell, file, text")
    return tag(
        "div",
        tag("div", _legend(cells, marks), ramp, tag("span", id="count", role="status", class_="quiet js"),
            tag("button", "all cells", type="button", id="all", hidden=True, class_="js"),
            tag("span", "arrows, Enter, Esc · n, p: next, previous failing · /: search", class_="quiet js keys"),
            tag("button", "light / dark", type="button", id="theme", class_="js")),
        tag("div", _choice("rows"), _choice("columns"), _choice("by", *choices, label="colour by"),
            tag("label", "search", search), tag("span", "only", class_="quiet"), tag("span", id="filters"),
            class_="js"),
        class_="controls",
    )  # fmt: skip


def _legend(cells: Sequence[Facts], marks: Mapping[str, str]) -> Html:
    counts = Counter(cell.status for cell in cells)
    marked = Counter(marks[cell.id] for cell in cells if cell.id in marks)
    items = [tag("li", tag("label", tag("input", type="checkbox", checked=True, value=name, class_="js"),
                           tag("span", style.letter, class_=f"s {name}", aria_hidden="true"),
                           f" {name} {counts[name]}", title=style.help))
             for name, style in VERDICT_STYLES.items() if counts[name]]
    items += [tag("li", tag("span", class_=f"s skip {mark}", aria_hidden="true"), f" {told} {marked[mark]}")
              for mark, told in MARKS.items() if marked[mark]]
    return tag("ul", *items, class_="legend", aria_label="Verdicts")


def _choice(id: str, *options: Html, label: str = "") -> Html:
    return tag("label", label or id, tag("select", *options, id=id))
