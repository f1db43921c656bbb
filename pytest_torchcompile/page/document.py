"""Document: the whole page as one HTML file. Readable without JavaScript, which only sorts, filters and colours.

Each cell's article is in a ``noscript`` element. Without JavaScript it is part of the page, and shown where a link
leads to it. With JavaScript the browser takes it for one long text, which costs next to nothing, and only the articles
that somebody opens are made into elements: so a page of 1,000 cells opens at once.

No address but the file's own is ever asked: the Content-Security-Policy allows this page's one script and one style
sheet, by their hashes, and nothing else. So what a report smuggles into the page cannot run either.

In its order: what a release manager reads first, findings or the open cell, the trend, the map with its controls,
tests, the run. So findings come before the map where one column is all that there is.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.gate.announcement import sentence
from pytest_torchcompile.gate.gate import GateOutcome, gate
from pytest_torchcompile.gate.policyfile import read_policy
from pytest_torchcompile.page.article import article
from pytest_torchcompile.page.baseline_comparison import compare_cells, tell_news
from pytest_torchcompile.page.code_section import code_section
from pytest_torchcompile.page.controls import controls, measure_cells
from pytest_torchcompile.page.heatmap import DENSE, FAILING, WIDTH, HeatMap, map_table, square_class
from pytest_torchcompile.page.markup import VERDICT_STYLES, Html, anchor, data, style_rules, tag
from pytest_torchcompile.page.masthead import NAME, masthead
from pytest_torchcompile.page.overview import group_findings, overview, run_section, tests_section
from pytest_torchcompile.page.past_runs import History, read_folder
from pytest_torchcompile.page.shell import shell, themed
from pytest_torchcompile.page.svg import svg
from pytest_torchcompile.page.trend import trend_section
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.code_changes import CodeStore, store_of
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.merging import Merged, merge_reports
from pytest_torchcompile.report.reading import Report, default_report, read_report
from pytest_torchcompile.report.safe_output import write_output

__all__ = ["page", "run_command"]

# ------------------------------------------------------------------------------------------------------- the whole page
def run_command(given: argparse.Namespace) -> int:
    """The command ``pytest-torchcompile html``: read reports, write the page and the picture.

    The exit code is 0 whatever the page says: to judge is the gate's task.

    :raises ReportError: the reports cannot be read, or are not of one run.
    :raises UsageError: a file cannot be written, or `--source` is no address.
    """
    given.reports = given.reports or [default_report("html")]
    source = _source_address(given.source)
    (reports, history), baseline = _read_given(given.reports), list(map(read_report, given.baseline or ()))
    policy = None if given.policy is None else read_policy(given.policy)
    outcome = gate(reports, policy, baseline)
    before = merge_reports(baseline) if baseline else None
    stores = (store_of(given.baseline[0]), store_of(given.reports[0])) if baseline else None
    text = page(outcome, before, source=source, history=history, stores=stores)
    write_output(given.output, text, force=given.force)
    if given.svg is not None:
        write_output(given.svg, svg(outcome), force=given.force)
    print(sentence(outcome))
    print(" and ".join(filter(None, (given.output, given.svg))), "written")
    return 0


def _read_given(paths: Sequence[str]) -> tuple[list[Report], History]:
    """Reports of one run; or a folder, which has the runs of a trend, of which the newest is shown."""
    folders = [path for path in paths if Path(path).is_dir()]
    if not folders:
        return list(map(read_report, paths)), History()
    if len(paths) > 1:
        raise UsageError(f"html: {folders[0]} is a folder; expected it alone, or the reports of one run. "
                         "A folder's newest run is shown, and the others are its trend.")
    return read_folder(Path(folders[0]))


def _source_address(given: str | None) -> str:
    if given is None:
        return ""
    # Anything else, such as javascript:, would be a link that runs something.
    if not re.match(r"https?://[^\s{}]", given) or "{file}" not in given:
        raise UsageError(f"--source {given}: expected an address with {{file}} and {{line}} in it, for example "
                         "https://github.com/OWNER/REPO/blob/main/{file}#L{line}")
    return given


def page(outcome: GateOutcome, before: Merged | None = None, *, source: str = "",
         history: History | None = None, stores: tuple[CodeStore, CodeStore] | None = None) -> str:
    """The page of a run.

    :param outcome: the run, and what the gate says of it.
    :param before: an earlier run that it is compared with.
    :param source: address of a source file, with ``{file}`` and ``{line}``, for links to the user's lines.
    :param history: earlier runs, with this one as the last.
    :param stores: where the generated code of the earlier run and of this one is kept.
    """
    history = (history or History()).judged_again(outcome.cells)
    heat, comparison = HeatMap(outcome.facts), compare_cells(outcome, before)
    numbers, marks = measure_cells(heat.cells), comparison.marks
    sorted_findings, news = group_findings(outcome.findings), tell_news(outcome, before, history)
    # By the index of a finding: its button shows only its cells.
    groups = [finding.cells for finding in outcome.findings]
    articles = []
    listed: dict[Html, str] = {}
    for cell in heat.cells:
        command = _command_again(outcome.merged, cell.id)
        articles.append(tag("noscript", article(cell, command, source, comparison.note_on(cell.id), listed)))
    return shell(
        f"{sentence(outcome)} · {NAME}", themed(_file_text("page.css"), style_rules()), Html(_file_text("page.js")),
        masthead(outcome, sorted_findings, news),
        tag(
            "main",
            tag("section", tag("div", id="open"), articles, overview(outcome, sorted_findings, news, source),
                class_="pane side", id="side", aria_label="Findings, or the open cell"),
            tag("section", trend_section(history), tag("h2", _map_title(heat)),
                controls(heat.cells, numbers, marks), tag("div", map_table(heat, marks), class_="scroll"),
                tests_section(outcome, source), code_section(outcome.merged, before, stores),
                run_section(outcome, heat),
                class_="pane", aria_label="Map of the cells"),
        ),
        tag("script", data(_script_data(heat, numbers, marks, groups)), type="application/json", id="data"),
    )  # fmt: skip


def _map_title(heat: HeatMap) -> str:
    title = count(len(heat.cells), "cell")
    if any(cell.status in FAILING for cell in heat.cells):
        title += ", what fails first"
    return title


def _file_text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


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
        # Numbers instead of texts, for each cell repeats its values.
        ranks[axis] = {value: rank for rank, value in enumerate(values)}
    cells = []
    for cell in heat.cells:
        cells.append({"id": anchor(cell.id), "s": cell.status, "d": square_class(cell, marks.get(cell.id, "")),
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
        "groups": [_places_on_map(group, index_of) for group in groups],
    }  # fmt: skip


def _places_on_map(group: Iterable[str], index_of: Mapping[str, int]) -> list[int]:
    # A finding may name tests, which are not on the map.
    return [index_of[cell] for cell in group if cell in index_of]


def _verdict_indices(cell: Facts, checks: Iterable[str]) -> list[int]:
    """Of each check; -1 where the cell has no verdict of it."""
    verdicts = list(VERDICT_STYLES)
    known = {verdict.check: verdict.verdict for verdict in cell.verdicts}
    indices = []
    for check in checks:
        indices.append(verdicts.index(known[check]) if known.get(check) in VERDICT_STYLES else -1)
    return indices
