"""Repeated failures: what fails for a cause that an item before it has told is counted, and not told again.

A model that cannot be imported fails each check of each of its cells. All of them are failed items, in every report and
for ``--lf``; at the end of the run the first one is shown, and the others are ``same cause``. The same graph break in
several cells is a failure of each, and told in full once.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

import pytest

from pytest_torchcompile.observation import NO_RANK
from pytest_torchcompile.ranks.execution import CellResult
from pytest_torchcompile.report.causes import told_by
from pytest_torchcompile.report.facts import Facts

__all__ = ["RepeatedFailures", "mark_repeated"]

MARK: Final = "compile_told_by"
"""The attribute of a test report that says which item has told its cause, and what stopped the cell if it had no
result; it travels from an xdist worker to the controller."""
SHORT: Final = "compile_short_text"
"""The attribute with a :class:`ShortText`, as plain data."""
SAME_CAUSE: Final = "same cause"
"""What pytest's last line calls them."""
StatusTexts: TypeAlias = tuple[str, str, tuple[str, Mapping[str, bool]]]
"""The category that the last line counts, the letter in the line of progress, and the word of ``-v``, marked up."""


@dataclass(frozen=True)
class ShortText:
    """How a failure is shown where an item of another cell has told the same in full."""

    same: str
    """What both have in common."""
    text: str


def mark_repeated(report: pytest.TestReport, check: str, result: CellResult, short: ShortText | None = None) -> None:
    """Note on a failed report which check of the cell tells the same, and the mistake for which nothing was run.

    ``short``: for a failure that other cells may have told.
    """
    failure = result.observation.failure
    # What could not be run at all has a word of its own: NOT RUN.
    if not report.failed or (failure is not None and failure.kind == NO_RANK):
        return
    verdicts = Facts({"checks": {name: each.to_dict() for name, each in result.judgements.items()}}).verdicts
    first = told_by(verdicts).get(check, "")
    mistake = ""
    # A matrix, a model or inputs that are wrong are wrong in every cell of that model, and are mended once.
    if failure is not None and failure.kind in ("usage", "user"):
        mistake = failure.message
    if first or mistake:
        setattr(report, MARK, {"first": first, "mistake": mistake})
    elif short is not None:
        setattr(report, SHORT, asdict(short))


class RepeatedFailures:
    """Decides where all reports arrive: items may run in any order, and on any worker."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        """Node ids of items whose text is shown."""
        self._mistakes: set[str] = set()
        self._repeated: set[str] = set()
        self._same: set[str] = set()
        """What failures of several cells have in common, told once."""
        self._shorter: list[tuple[pytest.TestReport, str]] = []
        self._ahead: list[tuple[pytest.TestReport, str]] = []
        """Failures whose cause is told by an item that had not arrived when they did, and its node id."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember what is told for the first time, and what is not."""
        if not report.failed:
            return
        mark: dict[str, Any] = getattr(report, MARK, {"first": "", "mistake": ""})
        cell, _, _ = report.nodeid.rpartition("::")
        teller = f"{cell}::{mark['first']}"
        if mark["mistake"] in self._mistakes or teller in self._told:
            self._repeated.add(report.nodeid)
            return
        if mark["first"]:
            self._ahead.append((report, teller))
        self._told.add(report.nodeid)
        if mark["mistake"]:
            self._mistakes.add(mark["mistake"])
        self._remember_short_text(report)

    def _remember_short_text(self, report: pytest.TestReport) -> None:
        short: dict[str, str] | None = getattr(report, SHORT, None)
        if short is None:
            return
        if short["same"] in self._same:
            self._shorter.append((report, short["text"]))
        self._same.add(short["same"])

    # Around pytest's own, which lists the texts. Files such as JUnit's have them in full: each is read by itself.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
        """Show what another cell has told in a line, and what only follows at its cause alone.

        Not before the end: where a run stops early, the cause may never be told.
        """
        failed = terminalreporter.stats.get("failed", [])
        for report, teller in self._ahead:
            if teller in self._told and report in failed:
                failed.remove(report)
                terminalreporter.stats.setdefault(SAME_CAUSE, []).append(report)
        for report, text in self._shorter:
            report.longrepr = text
        return (yield)

    # Before pytest's own, which calls it `failed` and lists its text at the end.
    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.CollectReport | pytest.TestReport) -> StatusTexts | None:
        """Count under a name of its own what has been told; one failure has one letter. With -v each has its word."""
        if not report.failed or report.nodeid not in self._repeated:
            return None
        return SAME_CAUSE, "", ("FAILED", {"red": True})
