"""Tests: those of the model repository that use our fixtures, as a table below the map, the worst first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

from pytest_torchcompile.gate.gate import GateOutcome
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.testjudged import facts_of_test
from pytest_torchcompile.observation import VERDICTS
from pytest_torchcompile.page.ledger_tables import compiles, eager_frames, graph_breaks
from pytest_torchcompile.page.markup import Html, fit, tag
from pytest_torchcompile.page.pieces import badge, columns, cut, more, place
from pytest_torchcompile.quantity import count, readable_seconds
from pytest_torchcompile.report.testrecord import TEST_CHECK

__all__ = ["link_test", "tests"]

SHOWN: Final = 400
"""Rows; what is more is counted."""
COLUMNS: Final = {"compiles": "compiles", "recompiles": "recompiles", "graph_breaks": "graph breaks",
                  "eager_frames": "ran eagerly", "runs": "graph runs"}


def tests(outcome: GateOutcome, source: str) -> Html | None:
    """The section; None where no test uses our fixtures."""
    if not outcome.tests:
        return None
    ordered = sorted(outcome.tests.values(), key=lambda test: -VERDICTS.index(test.status))
    rows = [_row(outcome, test, source) for test in ordered[:SHOWN]]
    head = columns("verdict", "test", *COLUMNS.values(), "time")
    return tag(
        "section", tag("h2", f"{count(len(outcome.tests), 'test')} of yours with our fixtures"),
        tag("table", head, tag("tbody", *rows)), more(len(ordered), SHOWN),
        class_="whole tests", id="tests", aria_label="Tests",
    )  # fmt: skip


def link_test(name: str) -> str:
    """The address of a test's row within the page."""
    return "#" + quote(_anchor(name), safe=":")


def _anchor(name: str) -> str:
    return fit(f"test:{name}")


def _row(outcome: GateOutcome, test: JudgedCell, source: str) -> Html:
    told = outcome.merged.tests[test.id]
    about = tag("td", tag("bdi", test.id), *_about(test, told, source))
    numbers = [tag("td", _count(told, name), class_="number") for name in COLUMNS]
    time = readable_seconds(test.seconds) if test.status not in ("skip", "not_run") and test.seconds is not None else ""
    return tag("tr", tag("td", badge(test.status)), about, *numbers, tag("td", time, class_="number"),
               id=_anchor(test.id))  # fmt: skip


def _count(told: Mapping[str, Any], name: str) -> str:
    """The number, and how many its limit allows."""
    limit = told["limits"].get(name)
    return f"{told['counts'][name]}" + (f" (limit {limit})" if limit is not None else "")


def _about(test: JudgedCell, told: Mapping[str, Any], source: str) -> Iterator[Html]:
    """Why it does not hold, or was not run; and its ledger, folded."""
    if note := test.verdicts[TEST_CHECK].get("note"):
        yield tag("p", cut(note), class_="quiet")
    if told["attempts"] > 1:
        yield tag("p", f"run {told['attempts']} times; this is the last", class_="quiet")
    facts = facts_of_test(test)
    for verdict in facts.verdicts:
        for problem in verdict.problems:
            yield tag("p", cut(problem.message), " ", place(problem.file, problem.line, source) if problem.file else "",
                      class_="message")
            if problem.evidence:
                yield tag("details", tag("summary", "evidence"), tag("pre", cut(problem.evidence)))
    ledger = (graph_breaks(facts, source), compiles(facts, source), eager_frames(facts, source))
    if any(ledger):
        yield tag("details", tag("summary", "what was compiled"), *ledger)
