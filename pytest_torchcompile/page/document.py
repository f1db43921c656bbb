"""Document: the whole page as one HTML file. Readable without JavaScript, which only sorts, filters and colours.

Each cell's article is in a ``noscript`` element. Without JavaScript it is part of the page, and shown where a link
leads to it. With JavaScript the browser takes it for one long text, which costs next to nothing, and only the articles
that somebody opens are made into elements: so a page of 1,000 cells opens at once.

No address but the file's own is ever asked: the Content-Security-Policy allows this page's one script and one style
sheet, by their hashes, and nothing else. So what a report smuggles into the page cannot run either.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from pytest_torchcompile.gate.announcement import run_facts, sentence
from pytest_torchcompile.gate.gate import GateOutcome
from pytest_torchcompile.page.article import article
from pytest_torchcompile.page.baseline_cells import compared
from pytest_torchcompile.page.controls import controls
from pytest_torchcompile.page.grid import WIDTH
from pytest_torchcompile.page.heatmap import DENSE, FAILING, HeatMap, table
from pytest_torchcompile.page.markup import Html, data, tag
from pytest_torchcompile.page.measures import measured
from pytest_torchcompile.page.overview import overview, whole
from pytest_torchcompile.page.pieces import anchor
from pytest_torchcompile.page.tests import tests
from pytest_torchcompile.page.theme import VERDICT_STYLES, sheet, variables
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.merging import Merged

__all__ = ["page"]

NAME: Final = "torch.compile matrix"


def page(outcome: GateOutcome, before: Merged | None = None, *, source: str = "") -> str:
    """The page of a run.

    :param outcome: the run, and what the gate says of it.
    :param before: an earlier run that it is compared with.
    :param source: address of a source file, with ``{file}`` and ``{line}``, for links to the user's lines.
    """
    heat, comparison, told = HeatMap(outcome.facts), compared(outcome, before), sentence(outcome)
    numbers, marks = measured(heat.cells), comparison.marks
    groups = [finding.cells for finding in outcome.findings]
    style, script = _style(), Html(_file("page.js"))
    head = tag(
        "head", tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{told} · {NAME}"), tag("style", style),
    )  # fmt: skip
    body = tag(
        "body",
        tag("header", tag("h1", NAME), tag("p", told, class_="sentence good" if outcome.code == 0 else "sentence bad"),
            tag("p", run_facts(outcome), class_="env"), class_="top"),
        controls(heat.cells, numbers, marks),
        tag("main", table(heat, marks), tests(outcome, source), whole(outcome, heat), class_="pane",
            aria_label="Map of the cells"),
        tag("aside", tag("div", id="open"),
            *(tag("noscript", article(cell, _again(outcome.merged, cell.id), source, comparison.of(cell.id)))
              for cell in heat.cells),
            overview(outcome, source), class_="pane side", id="side", aria_label="Details"),
        tag("script", data(_data(heat, numbers, marks, groups)), type="application/json", id="data"),
        tag("script", script),
    )  # fmt: skip
    return f"<!doctype html>\n{tag('html', head, body, lang='en', class_='no-js')}\n"


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _style() -> Html:
    def theme(dark: bool) -> str:
        scheme = "dark" if dark else "light"
        return f"color-scheme:{scheme};" + ";".join(f"--{name}:{value}" for name, value in variables(dark).items())

    return Html("\n".join((
        f":root{{{theme(False)}}}",
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{theme(True)}}}}}",
        f":root[data-theme=dark]{{{theme(True)}}}",
        _file("page.css"), sheet(),
    )))  # fmt: skip


def _policy(style: str, script: str) -> str:
    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (f"default-src 'none'; style-src 'sha256-{digest(style)}'; script-src 'sha256-{digest(script)}'; "
            "base-uri 'none'; form-action 'none'")  # fmt: skip


def _again(run: Merged, cell: str) -> str:
    path = run.matrix["path"]
    return f"pytest --compile-matrix={path} '{path}::{cell}'"


def _data(heat: HeatMap, numbers: Mapping[str, Sequence[float | None]], marks: Mapping[str, str],
          groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What page.js works with."""
    by = heat.order
    ranks = {axis: {value: i for i, value in enumerate(values)} for axis, values in heat.values.items()}
    at = {cell.id: i for i, cell in enumerate(heat.cells)}
    checks = list(dict.fromkeys(v.check for c in heat.cells for v in c.verdicts))
    verdicts = list(VERDICT_STYLES)

    def judged(cell: Facts) -> list[int]:
        known = {v.check: v.verdict for v in cell.verdicts}
        return [verdicts.index(known[check]) if known.get(check) in VERDICT_STYLES else -1 for check in checks]

    return {
        "axes": [{"name": axis, "values": values} for axis, values in heat.values.items()],
        "order": by.axes, "rows": by.rows, "columns": by.columns,
        "width": WIDTH, "dense": len(heat.cells) > DENSE,
        "verdicts": verdicts, "letters": {name: style.letter for name, style in VERDICT_STYLES.items()},
        "failing": sorted(FAILING), "checks": checks,
        "numbers": {name: {"name": name, "values": values} for name, values in numbers.items()},
        "cells": [{"id": anchor(c.id), "s": c.status, "d": marks.get(c.id, ""), "c": judged(c),
                   "v": [ranks[axis][c.axes.get(axis, "")] for axis in ranks]} for c in heat.cells],
        "groups": [[at[cell] for cell in group if cell in at] for group in groups],
    }  # fmt: skip
