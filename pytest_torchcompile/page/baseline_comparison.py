"""Comparison: what the page says of an earlier run, at the map, in a cell's article, at findings and on the cards."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Final

from pytest_torchcompile.gate.baseline import Change, another_machine, find_changes
from pytest_torchcompile.gate.gate import GateOutcome, judge_cells
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.page.markup import Html, badge, join, tag
from pytest_torchcompile.page.past_runs import History, PastRun, label_of_run
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.finding import Finding
from pytest_torchcompile.report.merging import Merged

__all__ = ["MARKS", "BaselineCells", "News", "compare_cells", "tell_news"]

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
        changes = []
        for change in self.changes:
            # That a cell is new is said below, in words of its own.
            if cell in change.cells and change.kind != "new":
                changes.append(tag("li", change.text))
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


# ---------------------------------------------------------------------------------------- since when a finding is there
@dataclass(frozen=True)
class News:
    """Since when each finding of the gate is there; both tuples are by its index."""

    beside: str = ""
    """The run that *new* is said of: its commit and its day. Empty: there is none."""
    new: tuple[bool, ...] = ()
    since: tuple[str, ...] = ()
    """Empty where nothing is known."""

    def on_card(self, findings: list[int]) -> str:
        """What the card of some findings says; empty where no earlier run is known."""
        if not self.beside:
            return ""
        number = sum(self.new[index] for index in findings)
        return f"{number or 'none'} new since {self.beside}"


def tell_news(outcome: GateOutcome, before: Merged | None, history: History) -> News:
    """Look findings up in the runs of a folder; where there are none, in the baseline alone."""
    if before is not None:
        beside = label_of_run(before.git, _began(before))
    elif history.reference >= 0:
        beside = history.runs[history.reference].label
    else:
        return News()
    new, since = [], []
    for finding in outcome.findings:
        is_new, words = _news_of_finding(finding, before, history, beside)
        new.append(is_new)
        since.append(words)
    return News(beside, tuple(new), tuple(since))


def _began(run: Merged) -> str:
    return str((run.reports[0].block["run"] or {}).get("started", ""))


def _news_of_finding(finding: Finding, before: Merged | None, history: History, beside: str) -> tuple[bool, str]:
    """Is it new, and since when is it there?"""
    if finding.weight == "note":
        return False, ""
    first = _first_run_with(finding, history)
    if first is None or len(history.runs) < 2:
        is_new = before is not None and (finding.new or finding.kind == "baseline")
        return is_new, f"new since {beside}" if is_new else ""
    is_new = first > history.reference
    # A baseline was named, so it decides what is new.
    if before is not None:
        is_new = finding.new
    if first == 0:
        return is_new, f"in all {count(len(history.runs), 'run')} since {history.runs[0].label}"
    word = "new with" if is_new else "since"
    return is_new, f"{word} {_turn_in_words(history.runs[first - 1], history.runs[first])}"


def _first_run_with(finding: Finding, history: History) -> int | None:
    """The first of the runs, up to the last one, in all of which one of its cells fails by one of its checks."""
    if finding.cause is None:
        return None
    found: list[int] = []
    for cell in finding.cells:
        start = history.red_since(cell, (*finding.cause.checks, *finding.cause.consequences))
        if start is not None:
            found.append(start)
    return min(found, default=None)


def _turn_in_words(last_good: PastRun, first_bad: PastRun) -> str:
    """The run, and what software was another one in it."""
    changed = first_bad.software_changes(last_good)
    return ", ".join([first_bad.label, *changed])
