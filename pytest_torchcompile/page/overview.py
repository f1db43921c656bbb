"""Overview: what stands beside the map while no cell is open, and below it: findings, pass rates, the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from pytest_torchcompile.gate.announcement import command_again
from pytest_torchcompile.gate.gate import GateOutcome
from pytest_torchcompile.page.heatmap import FAILING, HeatMap
from pytest_torchcompile.page.markup import Html, join, tag
from pytest_torchcompile.page.pieces import cut, hint, link, more, place
from pytest_torchcompile.page.tests import link_test
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.finding import Finding, foremost_findings
from pytest_torchcompile.report.merging import Merged

__all__ = ["overview", "whole"]

LINKS: Final = 40
FINDINGS: Final = 60


def overview(outcome: GateOutcome, source: str) -> Html:
    """What the gate says, as in its text; each finding leads to its cells."""
    found = outcome.findings
    shown = foremost_findings(found, FINDINGS)
    items = [_finding(outcome, finding, found.index(finding), source) for finding in shown]
    told = tag("ul", *items, class_="findings") if items else tag("p", "Nothing to tell. A cell of the map opens here.")
    policy = f", under {outcome.policy.path}" if outcome.policy.path else ""
    return tag(
        "section", tag("h2", f"What the gate says{policy}: exit code {outcome.code}"),
        told, more(len(found), len(shown)),
        class_="overview", id="overview", tabindex=-1, aria_label="Overview",
    )  # fmt: skip


def _finding(outcome: GateOutcome, finding: Finding, index: int, source: str) -> Html:
    cells = [cell for cell in finding.cells if cell in outcome.cells]
    tests = [test for test in finding.cells if test in outcome.tests]
    links = [tag("a", cell, href=link(cell)) for cell in cells[:LINKS]]
    told = count(len(tests), "test") if tests else count(len(cells), "cell")
    command = command_again(outcome, finding)
    button = tag("button", "only these", type="button", class_="js", data_group=index)
    return tag(
        "li",
        tag("p", tag("span", finding.weight, class_=f"weight {finding.weight}"), " ",
            tag("span", told, class_="count") if cells or tests else finding.kind.replace("_", " "), " ",
            place(finding.file, finding.line, source) if finding.file else ""),
        tag("p", cut(finding.text), class_="message"),
        *(tag("p", cut(line), class_="quiet") for line in finding.lines),
        tag("details", tag("summary", "evidence"), tag("pre", cut(finding.evidence))) if finding.evidence else None,
        hint(finding.hint),
        tag("p", "again ", tag("code", command), class_="again") if command else None,
        tag("details", tag("summary", "cells ", button), tag("div", *links, more(len(cells), LINKS), class_="cells"))
        if cells else None,
        tag("p", *(join(tag("a", test, href=link_test(test)), " ") for test in tests[:LINKS]),
            more(len(tests), LINKS)) if tests else None,
    )  # fmt: skip


def whole(outcome: GateOutcome, heat: HeatMap) -> Html:
    """What stands below the map: pass rates, and what the run was."""
    return tag("section", _rates(heat), _run(outcome.merged, heat.cells), class_="whole", aria_label="The run")


def _rates(heat: HeatMap) -> Html | None:
    tables = []
    for axis in heat.order.axes:
        rows = []
        for value in heat.values[axis][:LINKS]:
            ran = [c for c in heat.cells if c.axes.get(axis, "") == value and c.status not in ("skip", "not_run")]
            good = sum(c.status not in FAILING for c in ran)
            told = f"{good} of {len(ran)}" if ran else "none ran"
            head = tag("th", value or "(none)", scope="row", title=value)
            rows.append(tag("tr", head, tag("td", _rate(good, len(ran))), tag("td", told, class_="number")))
        tables.append(tag("table", tag("caption", axis), tag("tbody", *rows)))
    if not tables:
        return None
    return join(tag("h2", "Cells that hold, by axis; the axes that tell most come first"),
                tag("div", *tables, class_="rates"))


def _rate(good: int, ran: int) -> Html | None:
    if not ran:
        return None
    share = 100 * good / ran
    return tag("svg", tag("rect", width=f"{share:.1f}", height=8, class_="ok"),
               tag("rect", x=f"{share:.1f}", width=f"{100 - share:.1f}", height=8, class_="no"),
               viewBox="0 0 100 8", preserveAspectRatio="none", class_="rate", aria_hidden="true")  # fmt: skip


def _run(run: Merged, cells: Sequence[Facts]) -> Html:
    told = {"matrix": run.matrix["path"] or None, **run.environment}
    if run.git:
        told["commit"] = run.git["commit"] + (" (with changes)" if run.git["changed"] else "")
    rows = [tag("tr", tag("th", key, scope="row"), tag("td", _shown(value)))
            for key, value in told.items() if value is not None]
    excluded: dict[str, int] = run.matrix["excluded"]
    skipped = Counter(c.note for c in cells if c.status == "skip")
    return join(tag("h2", "The run"), tag("table", tag("tbody", *rows)),
                _reasons("excluded", excluded.items()), _reasons("skipped", skipped.most_common()))


def _reasons(what: str, reasons: Iterable[tuple[str, int]]) -> Html | None:
    items = [tag("li", f"{count} {what}: {reason or 'no reason told'}") for reason, count in reasons]
    return tag("ul", *items) if items else None


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
