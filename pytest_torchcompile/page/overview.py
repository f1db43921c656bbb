"""Overview: what stands beside the map while no cell is open, and below it: findings, tests, pass rates, the run.

Findings are in groups, one for each severity; the cards of the page's top lead to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from pytest_torchcompile.checks.severity import TEST_CHECK, Severity
from pytest_torchcompile.gate.announcement import command_again
from pytest_torchcompile.gate.gate import GateOutcome
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.testjudged import facts_of_test
from pytest_torchcompile.observation import VERDICTS
from pytest_torchcompile.page.baseline_comparison import News
from pytest_torchcompile.page.expectations import expectations_section
from pytest_torchcompile.page.heatmap import FAILING, HeatMap
from pytest_torchcompile.page.ledger_tables import compiles_section, eager_frames_section, graph_breaks_section
from pytest_torchcompile.page.markup import (
    Html,
    again,
    badge,
    columns,
    cut,
    fit,
    hint,
    join,
    link,
    more_note,
    place,
    tag,
)
from pytest_torchcompile.quantity import count, first_names, readable_seconds
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.finding import Finding, Weight, foremost_findings
from pytest_torchcompile.report.merging import Merged

__all__ = ["FindingGroup", "group_findings", "overview", "run_section", "tests_section"]

# Browsers lay out a page of ten thousand cells slowly, and nobody reads so many rows.
LINKS: Final = 40
FINDINGS: Final = 60
TESTS: Final = 400
"""Rows; what is more is counted."""
COLUMNS: Final = {"compiles": "compiles", "recompiles": "recompiles", "graph_breaks": "graph breaks",
                  "eager_frames": "ran eagerly", "runs": "graph runs"}


# findings
_TITLES: Final = {
    Severity.WRONG_NUMBERS: "Wrong numbers",
    Severity.CRASH: "Crashes and errors",
    Severity.SILENTLY_EAGER: "Not compiled",
    Severity.UNSTABLE: "Unstable",
    Severity.SLOW: "Slow",
    Severity.COSMETIC: "Out of date",
}
_TITLES_OF_RUN: Final = {"fail": "The run", "unusable": "Unusable", "nothing": "Nothing to judge", "note": "Notes"}
"""Of findings that tell nothing of a model, by their weight."""


@dataclass
class FindingGroup:
    """The findings of one severity."""

    title: str
    weight: Weight
    findings: list[int]
    """Their places among all findings."""


def group_findings(findings: Sequence[Finding]) -> list[FindingGroup]:
    """The groups, in the order of their first findings: the worst come first."""
    groups: dict[str, FindingGroup] = {}
    for index, finding in enumerate(findings):
        title = _TITLES_OF_RUN[finding.weight]
        # Only what fails has a severity of the model's; the rest is of the run, and stands under a title of its own.
        if finding.weight == "fail" and finding.severity:
            title = _TITLES[Severity(finding.severity)]
        groups.setdefault(title, FindingGroup(title, finding.weight, [])).findings.append(index)
    return list(groups.values())


def overview(outcome: GateOutcome, groups: Sequence[FindingGroup], news: News, source: str) -> Html:
    """What the gate says, as in its text; each finding leads to its cells."""
    findings = outcome.findings
    shown = set(map(id, foremost_findings(findings, FINDINGS)))
    content = []
    for number, group in enumerate(groups):
        items = []
        for index in group.findings:
            # By identity: two findings may be equal in every field, and both count.
            if id(findings[index]) in shown:
                items.append(_finding_item(outcome, index, news, source))
        heading = tag("h3", group.title, " ", tag("span", len(group.findings), class_="quiet"))
        content.append(tag("section", heading, tag("ul", items, class_="findings"), id=f"group-{number}",
                           class_=f"group {group.weight}"))
    if not content:
        content = [tag("p", "Nothing to tell. A cell of the map opens here.")]
    policy = f", under {outcome.policy.path}" if outcome.policy.path else ""
    return tag(
        "section", tag("h2", f"What the gate says{policy}: exit code {outcome.code}"),
        content, more_note(len(findings), len(shown)),
        expectations_section(outcome.facts),
        class_="overview", id="overview", tabindex=-1, aria_label="Overview",
    )  # fmt: skip


def _finding_item(outcome: GateOutcome, index: int, news: News, source: str) -> Html:
    finding = outcome.findings[index]
    cells = [cell for cell in finding.cells if cell in outcome.cells]
    tests = [test for test in finding.cells if test in outcome.tests]
    return tag(
        "li", _lead(finding), _news_line(index, news), tag("p", cut(finding.text)),
        _about_finding(finding, index, cells, tests, source),
        [tag("p", cut(line), class_="quiet") for line in _further_lines(finding)], hint(finding.hint),
        again(command_again(outcome, finding)), _evidence(finding.evidence),
        _cell_links(cells), _test_links(tests),
    )  # fmt: skip


def _lead(finding: Finding) -> Html | None:
    """``router, encoder compute wrong numbers``: the models, and what becomes of them."""
    cause = finding.cause
    if cause is None or not cause.models:
        return None
    return tag("p", f"{first_names(cause.models)} {cause.effect.of(len(cause.models))}", class_="message")


def _further_lines(finding: Finding) -> list[str]:
    """Without the line that it is new, which stands at its top."""
    return list(finding.cause.further_lines()) if finding.cause is not None else []


def _news_line(index: int, news: News) -> Html | None:
    """Since when it is there, where an earlier run is known."""
    if not news.since or not news.since[index]:
        return None
    words = news.since[index]
    if not news.new[index]:
        return tag("p", words, class_="since")
    return tag("p", tag("b", "new", class_="new"), " ", words.removeprefix("new "), class_="since")


def _about_finding(finding: Finding, index: int, cells: Sequence[str], tests: Sequence[str], source: str) -> Html:
    """How many cells or tests it is of, its kind, and its place. ``index``: by which page.js knows its cells."""
    parts: list[Html | str] = []
    if tests:
        parts.append(count(len(tests), "test"))
    # A finding may be of the run as a whole; then its kind stands there alone.
    elif cells:
        parts += [count(len(cells), "cell"),
                  tag("button", "only these", type="button", class_="js", data_group=index)]
    else:
        parts.append(finding.kind.replace("_", " "))
    if finding.file:
        parts.append(place(finding.file, finding.line, source))
    return tag("p", [join(part, " ") for part in parts], class_="about")


def _evidence(text: str) -> Html | None:
    if not text:
        return None
    return tag("details", tag("summary", "evidence"), tag("pre", cut(text)))


def _cell_links(cells: Sequence[str]) -> Html | None:
    if not cells:
        return None
    links = [tag("a", cell, href=link(cell)) for cell in cells[:LINKS]]
    return tag("details", tag("summary", "cells"), tag("div", links, more_note(len(cells), LINKS), class_="cells"))


def _test_links(tests: Sequence[str]) -> Html | None:
    if not tests:
        return None
    links = [join(tag("a", test, href="#" + quote(_test_anchor(test), safe=":")), " ") for test in tests[:LINKS]]
    return tag("p", links, more_note(len(tests), LINKS))


# tests of the model repository that use our fixtures


def tests_section(outcome: GateOutcome, source: str) -> Html | None:
    """A table below the map, the worst first; None where no test uses our fixtures."""
    if not outcome.tests:
        return None
    # Stable: tests of one verdict stay in the order of the report.
    ordered = sorted(outcome.tests.values(), key=lambda test: -VERDICTS.index(test.status))
    rows = [_test_row(outcome, test, source) for test in ordered[:TESTS]]
    head = columns("verdict", "test", *COLUMNS.values(), "time")
    return tag(
        "section", tag("h2", f"{count(len(outcome.tests), 'test')} of yours with our fixtures"),
        tag("div", tag("table", head, tag("tbody", rows)), class_="scroll"), more_note(len(ordered), TESTS),
        class_="whole tests", id="tests", aria_label="Tests",
    )  # fmt: skip


def _test_anchor(name: str) -> str:
    return fit(f"test:{name}")


def _test_row(outcome: GateOutcome, test: JudgedCell, source: str) -> Html:
    record = outcome.merged.tests[test.id]
    about = tag("td", tag("bdi", test.id), _about_test(test, record, source))
    numbers = [tag("td", _counted(record, name), class_="number") for name in COLUMNS]
    time = ""
    if test.status not in ("skip", "not_run") and test.seconds is not None:
        time = readable_seconds(test.seconds)
    return tag("tr", tag("td", badge(test.status)), about, numbers, tag("td", time, class_="number"),
               id=_test_anchor(test.id))  # fmt: skip


def _counted(record: Mapping[str, Any], name: str) -> str:
    """The number, and how many its limit allows."""
    number, limit = record["counts"][name], record["limits"].get(name)
    return f"{number}" if limit is None else f"{number} (limit {limit})"


def _about_test(test: JudgedCell, record: Mapping[str, Any], source: str) -> Iterator[Html]:
    """Why it does not hold, or was not run; and its ledger, folded."""
    note = test.verdicts[TEST_CHECK].get("note")
    if note:
        yield tag("p", cut(note), class_="quiet")
    # A plugin ran it again; a test that holds at the second try is worth a look.
    if record["attempts"] > 1:
        yield tag("p", f"run {record['attempts']} times; this is the last", class_="quiet")
    facts = facts_of_test(test)
    for verdict in facts.verdicts:
        for problem in verdict.problems:
            where = place(problem.file, problem.line, source) if problem.file else ""
            yield tag("p", cut(problem.message), " ", where, class_="message")
            evidence = _evidence(problem.evidence)
            if evidence:
                yield evidence
    ledger = (graph_breaks_section(facts, source), compiles_section(facts, source), eager_frames_section(facts, source))
    if any(ledger):
        yield tag("details", tag("summary", "what was compiled"), ledger)


# pass rates, and what the run was


def run_section(outcome: GateOutcome, heat: HeatMap) -> Html:
    """What stands below the map and the tests."""
    return tag("section", _pass_rates(heat), _about_run(outcome.merged, heat.cells), class_="whole",
               aria_label="The run")


def _pass_rates(heat: HeatMap) -> Html | None:
    tables = []
    for axis in heat.order.axes:
        rows = [_rate_row(heat, axis, value) for value in heat.values[axis][:LINKS]]
        tables.append(tag("table", tag("caption", axis), tag("tbody", rows)))
    if not tables:
        return None
    return join(tag("h2", "Cells that do not fail, by axis; the axes that tell most come first"),
                tag("div", tables, class_="rates"))


def _rate_row(heat: HeatMap, axis: str, value: str) -> Html:
    ran, good = 0, 0
    for cell in heat.cells:
        if cell.axes.get(axis, "") == value and cell.status not in ("skip", "not_run"):
            ran += 1
            good += cell.status not in FAILING
    head = tag("th", value or "(none)", scope="row", title=value)
    number = f"{good} of {ran}" if ran else "none ran"
    return tag("tr", head, tag("td", _rate_bar(good, ran)), tag("td", number, class_="number"))


def _rate_bar(good: int, ran: int) -> Html | None:
    if not ran:
        return None
    # The drawing is 100 units wide, so percent are lengths.
    share = 100 * good / ran
    return tag("svg", tag("rect", width=f"{share:.1f}", height=8, class_="ok"),
               tag("rect", x=f"{share:.1f}", width=f"{100 - share:.1f}", height=8, class_="no"),
               viewBox="0 0 100 8", preserveAspectRatio="none", class_="rate", aria_hidden="true")  # fmt: skip


def _about_run(run: Merged, cells: Sequence[Facts]) -> Html:
    # A run of tests alone has no matrix.
    facts = {"matrix": run.matrix["path"] or None, **run.environment}
    if run.git:
        facts["commit"] = run.git["commit"] + (" (with changes)" if run.git["changed"] else "")
    rows = []
    for key, value in facts.items():
        if value is not None:
            rows.append(tag("tr", tag("th", key, scope="row"), tag("td", _value_in_words(value))))
    excluded: dict[str, int] = run.matrix["excluded"]
    skipped = Counter(cell.note for cell in cells if cell.status == "skip")
    return join(tag("h2", "The run"), tag("table", tag("tbody", rows), class_="about-run"),
                _reasons("excluded", excluded.items()), _reasons("skipped", skipped.most_common()))


def _reasons(what: str, reasons: Iterable[tuple[str, int]]) -> Html | None:
    items = [tag("li", f"{number} {what}: {reason or 'no reason told'}") for reason, number in reasons]
    return tag("ul", items) if items else None


def _value_in_words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
