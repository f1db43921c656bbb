"""Document: the whole page as one HTML file. Readable without JavaScript, which only sorts, filters and colours.

Each cell's article is in a ``noscript`` element. Without JavaScript it is part of the page, and shown where a link
leads to it. With JavaScript the browser takes it for one long text, which costs next to nothing, and only the articles
that somebody opens are made into elements: so a page of 1,000 cells opens at once.

No address but the file's own is ever asked: the Content-Security-Policy allows this page's one script and one style
sheet, by their hashes, and nothing else. So what a report smuggles into the page cannot run either.

Before it the controls: the legend, and with JavaScript what the map shows and how; and the numbers that it can be
coloured by. What the map and a cell's article say of a baseline comes first; what the gate makes of it is a finding.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.gate.announcement import run_facts, sentence
from pytest_torchcompile.gate.baseline import Change, another_machine, find_changes
from pytest_torchcompile.gate.gate import GateOutcome, gate, judge_cells
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.gate.policy_limits import worst_rank
from pytest_torchcompile.gate.policyfile import read_policy
from pytest_torchcompile.page.article import article
from pytest_torchcompile.page.heatmap import DENSE, FAILING, WIDTH, HeatMap, map_table
from pytest_torchcompile.page.markup import (
    STEPS,
    VERDICT_STYLES,
    Html,
    anchor,
    badge,
    data,
    join,
    style_rules,
    tag,
    variables,
)
from pytest_torchcompile.page.overview import overview, run_section, tests_section
from pytest_torchcompile.page.svg import svg
from pytest_torchcompile.report.facts import Facts, as_number
from pytest_torchcompile.report.merging import Merged, merge_reports
from pytest_torchcompile.report.metrics import METRICS
from pytest_torchcompile.report.reading import read_report
from pytest_torchcompile.report.safe_output import write_output

__all__ = ["MARKS", "BaselineCells", "compare_cells", "controls", "measure_cells", "page", "run_command"]

MARKS: Final = {
    "worse": "worse than in the baseline",
    "better": "failed in the baseline",
    "added": "not in the baseline",
}
"""How a cell's square is outlined, and what it means."""
_MARK_OF: Final = {"improved": "better", "new": "added"}


@dataclass(frozen=True)
class BaselineCells:
    """A run beside an earlier one. Empty where there is none."""

    changes: tuple[Change, ...] = ()
    then: dict[str, str] = field(default_factory=dict)
    """Cell to its status in the baseline."""

    @property
    def marks(self) -> dict[str, str]:
        """Cell to a key of :data:`MARKS`, the worst that is true of it."""
        marks: dict[str, str] = {}
        # The worst change comes first, so it goes over the others' marks.
        for change in reversed(self.changes):
            marks |= dict.fromkeys(change.cells, _MARK_OF.get(change.kind, "worse"))
        return marks

    def note_on(self, cell: str) -> Html | None:
        """What an article says of the baseline; None where there is none."""
        if not self.then:
            return None
        changes = [tag("li", change.text) for change in self.changes if cell in change.cells and change.kind != "new"]
        status = self.then.get(cell)
        was = join("In the baseline: ", badge(status)) if status else "Not in the baseline."
        return tag("div", tag("p", was), tag("ul", changes) if changes else None, class_="before")


def compare_cells(outcome: GateOutcome, before: Merged | None) -> BaselineCells:
    """Compare a run with a baseline."""
    if before is None:
        return BaselineCells()
    then = judge_cells(before, Policy(), datetime.date.today())
    comparable = not another_machine(outcome.merged.environment, before.environment)
    differences = find_changes(outcome.cells, then, comparable)
    return BaselineCells(tuple(differences), {name: cell.status for name, cell in then.items()})


# --------------------------------------------------------------------------------------------------------- the controls
_HAVE_METRICS: Final = frozenset({"compiles", "graph_breaks", "recompiles", "kernels"})
"""Sections whose numbers are among the metrics, as far as they say anything."""


def measure_cells(cells: Sequence[Facts]) -> dict[str, list[float | None]]:
    """Each number that some cell has, and its value for every cell.

    Numbers that other sections hold at their top are among them, as ``section: key``.
    """
    numbers: dict[str, list[float | None]] = {}
    for name in METRICS:
        numbers[name] = [as_number(worst_rank(cell.ranks, name)) for cell in cells]
    numbers["coverage, %"] = list(map(_coverage_percent, cells))
    numbers["error over noise"] = list(map(_error_over_noise, cells))
    numbers["cell_seconds"] = [cell.total_seconds for cell in cells]
    for section, key in dict.fromkeys(_other_numbers(cells)):
        numbers[f"{section}: {key}"] = [as_number(cell.section(section).get(key)) for cell in cells]
    # A number that no cell has would be a choice that colours nothing.
    for name in [name for name, values in numbers.items() if set(values) <= {None}]:
        del numbers[name]
    return numbers


def _coverage_percent(facts: Facts) -> float | None:
    return None if facts.coverage is None else 100 * facts.coverage


def _error_over_noise(facts: Facts) -> float | None:
    """The largest of what was compared; 0 where everything is bitwise equal."""
    if not any(section.get("compared") for section in facts.compared.values()):
        return None
    return max((leaf.rms for leaf in facts.leaves if as_number(leaf.rms) and leaf.rms), default=0.0)


def _other_numbers(cells: Iterable[Facts]) -> Iterator[tuple[str, str]]:
    """(section, key) of numbers that are no metrics."""
    for cell in cells:
        for name, section in cell.sections.items():
            # Sections that compare have numbers of each tensor, and `error over noise` sums them up.
            if name in _HAVE_METRICS or name in cell.compared:
                continue
            for key, value in section.items():
                if as_number(value) is not None and key not in METRICS:
                    yield name, key


def controls(cells: Sequence[Facts], numbers: Iterable[str], marks: Mapping[str, str]) -> Html:
    """Two lines. ``numbers``: what the map can be coloured by; ``marks``: cell to its mark against a baseline."""
    checks: dict[str, None] = {}
    for cell in cells:
        checks.update((verdict.check, None) for verdict in cell.verdicts)
    choices = [tag("option", "verdict", value=""), _option_group("one check", "check", checks),
               _option_group("a number", "number", numbers)]
    steps = [tag("span", " ", class_=f"s step{number}") for number in range(len(STEPS))]
    # The script shows it where the map is coloured by a number.
    ramp = tag("span", tag("span", id="least"), " ", tag("span", steps, class_="ramp"), " ", tag("span", id="most"),
               id="ramp", hidden=True)
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


def _option_group(label: str, kind: str, names: Iterable[str]) -> Html:
    """``kind``: how page.js tells what to colour by."""
    return tag("optgroup", [tag("option", name, value=f"{kind} {name}") for name in names], label=label)


def _legend(cells: Sequence[Facts], marks: Mapping[str, str]) -> Html:
    counts = Counter(cell.status for cell in cells)
    items = []
    for name, style in VERDICT_STYLES.items():
        if counts[name]:
            box = tag("input", type="checkbox", checked=True, value=name, class_="js")
            letter = tag("span", style.letter, class_=f"s {name}", aria_hidden="true")
            items.append(tag("li", tag("label", box, letter, f" {name} {counts[name]}", title=style.help)))
    marked = Counter(marks[cell.id] for cell in cells if cell.id in marks)
    for mark, meaning in MARKS.items():
        if marked[mark]:
            square = tag("span", class_=f"s skip {mark}", aria_hidden="true")
            items.append(tag("li", square, f" {meaning} {marked[mark]}"))
    return tag("ul", items, class_="legend", aria_label="Verdicts")


def _choice(id: str, *options: Html, label: str = "") -> Html:
    return tag("label", label or id, tag("select", options, id=id))


# ------------------------------------------------------------------------------------------------------- the whole page
NAME: Final = "torch.compile matrix"


def run_command(given: argparse.Namespace) -> int:
    """The command ``pytest-torchcompile html``: read reports, write the page and the picture.

    The exit code is 0 whatever the page says: to judge is the gate's task.

    :raises ReportError: the reports cannot be read, or are not of one run.
    :raises UsageError: a file cannot be written, or `--source` is no address.
    """
    source = _source_address(given.source)
    reports, baseline = list(map(read_report, given.reports)), list(map(read_report, given.baseline or ()))
    policy = None if given.policy is None else read_policy(given.policy)
    outcome = gate(reports, policy, baseline)
    before = merge_reports(baseline) if baseline else None
    write_output(given.output, page(outcome, before, source=source), force=given.force)
    if given.svg is not None:
        write_output(given.svg, svg(outcome), force=given.force)
    print(sentence(outcome))
    print(" and ".join(filter(None, (given.output, given.svg))), "written")
    return 0


def _source_address(given: str | None) -> str:
    if given is None:
        return ""
    # Anything else, such as javascript:, would be a link that runs something.
    if not re.match(r"https?://[^\s{}]", given) or "{file}" not in given:
        raise UsageError(f"--source {given}: expected an address with {{file}} and {{line}} in it, for example "
                         "https://github.com/OWNER/REPO/blob/main/{file}#L{line}")
    return given


def page(outcome: GateOutcome, before: Merged | None = None, *, source: str = "") -> str:
    """The page of a run.

    :param outcome: the run, and what the gate says of it.
    :param before: an earlier run that it is compared with.
    :param source: address of a source file, with ``{file}`` and ``{line}``, for links to the user's lines.
    """
    heat, comparison, verdict = HeatMap(outcome.facts), compare_cells(outcome, before), sentence(outcome)
    numbers, marks = measure_cells(heat.cells), comparison.marks
    # By the index of a finding: its button shows only its cells.
    groups = [finding.cells for finding in outcome.findings]
    # Their hashes go into the page, so nothing may be added to them below.
    style, script = _style_sheet(), Html(_file_text("page.js"))
    head = tag(
        "head", tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_content_policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{verdict} · {NAME}"), tag("style", style),
    )  # fmt: skip
    articles = []
    for cell in heat.cells:
        command = _command_again(outcome.merged, cell.id)
        articles.append(tag("noscript", article(cell, command, source, comparison.note_on(cell.id))))
    body = tag(
        "body",
        tag("header", tag("h1", NAME),
            tag("p", verdict, class_="sentence good" if outcome.code == 0 else "sentence bad"),
            tag("p", run_facts(outcome), class_="env"), class_="top"),
        controls(heat.cells, numbers, marks),
        tag("main", map_table(heat, marks), tests_section(outcome, source), run_section(outcome, heat), class_="pane",
            aria_label="Map of the cells"),
        tag("aside", tag("div", id="open"), articles, overview(outcome, source), class_="pane side", id="side",
            aria_label="Details"),
        tag("script", data(_script_data(heat, numbers, marks, groups)), type="application/json", id="data"),
        tag("script", script),
    )  # fmt: skip
    return f"<!doctype html>\n{tag('html', head, body, lang='en', class_='no-js')}\n"


def _file_text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _style_sheet() -> Html:
    light, dark = _colour_variables(dark=False), _colour_variables(dark=True)
    return Html("\n".join((
        f":root{{{light}}}",
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}",
        f":root[data-theme=dark]{{{dark}}}",
        _file_text("page.css"), style_rules(),
    )))  # fmt: skip


def _colour_variables(dark: bool) -> str:
    colours = [f"--{name}:{value}" for name, value in variables(dark).items()]
    return ";".join(["color-scheme:dark" if dark else "color-scheme:light", *colours])


def _content_policy(style: str, script: str) -> str:
    return (f"default-src 'none'; style-src 'sha256-{_digest(style)}'; script-src 'sha256-{_digest(script)}'; "
            "base-uri 'none'; form-action 'none'")  # fmt: skip


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _command_again(run: Merged, cell: str) -> str:
    path = run.matrix["path"]
    return f"pytest --compile-matrix={path} '{path}::{cell}'"


def _script_data(heat: HeatMap, numbers: Mapping[str, Sequence[float | None]], marks: Mapping[str, str],
                 groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What page.js works with. Cells have their values and verdicts as indices, which keeps the page small."""
    order = heat.order
    index_of = {cell.id: index for index, cell in enumerate(heat.cells)}
    checks: dict[str, None] = {}
    for cell in heat.cells:
        checks.update((verdict.check, None) for verdict in cell.verdicts)
    ranks = {}
    for axis, values in heat.values.items():
        ranks[axis] = {value: rank for rank, value in enumerate(values)}
    cells = []
    for cell in heat.cells:
        cells.append({"id": anchor(cell.id), "s": cell.status, "d": marks.get(cell.id, ""),
                      "c": _verdict_indices(cell, checks),
                      "v": [ranks[axis][cell.axes.get(axis, "")] for axis in ranks]})
    return {
        "axes": [{"name": axis, "values": values} for axis, values in heat.values.items()],
        "order": order.axes, "rows": order.rows, "columns": order.columns,
        "width": WIDTH, "dense": len(heat.cells) > DENSE,
        "verdicts": list(VERDICT_STYLES), "letters": {name: style.letter for name, style in VERDICT_STYLES.items()},
        "failing": sorted(FAILING), "checks": list(checks),
        "numbers": {name: {"name": name, "values": values} for name, values in numbers.items()},
        "cells": cells,
        # A finding may name tests, which are not on the map.
        "groups": [[index_of[cell] for cell in group if cell in index_of] for group in groups],
    }  # fmt: skip


def _verdict_indices(cell: Facts, checks: Iterable[str]) -> list[int]:
    """Of each check; -1 where the cell has no verdict of it."""
    verdicts = list(VERDICT_STYLES)
    known = {verdict.check: verdict.verdict for verdict in cell.verdicts}
    indices = []
    for check in checks:
        indices.append(verdicts.index(known[check]) if known.get(check) in VERDICT_STYLES else -1)
    return indices
