"""What ``--compile-baseline`` prints at the end of a run: how it differs from an earlier report."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_torchcompile.errors import ReportError
from pytest_torchcompile.gate.baseline import Change, another_machine, find_changes, fresh_places
from pytest_torchcompile.gate.gate import judge_cells
from pytest_torchcompile.gate.policy import BASELINE, Policy
from pytest_torchcompile.gate.testjudged import judge_tests
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.causes import Fresh
from pytest_torchcompile.report.merging import Merged, merge_reports
from pytest_torchcompile.report.reading import Report

__all__ = ["BaselineSummary", "compare_with_baseline"]

SHOWN: Final = 30
_SOFTWARE: Final = ("torch", "triton", "python", "compiler", "cuda")


@dataclass
class BaselineSummary:
    """A run beside an earlier one."""

    lines: list[tuple[str, dict[str, bool]]]
    """What is printed, with markup."""
    fresh: Fresh = field(default_factory=Fresh)
    """What is worse than it was."""


def compare_with_baseline(block: dict[str, Any], baseline: Sequence[Report]) -> BaselineSummary:
    """Compare. Only cells and tests that this run judged: others may be another shard's, or were not asked for."""
    today = datetime.date.today()
    try:
        now, then = merge_reports([Report("this run", block)]), merge_reports(baseline)
        # The default policy: what a release allows is not asked here.
        cells_now, cells_then = judge_cells(now, Policy(), today), judge_cells(then, Policy(), today)
    except ReportError as error:
        return BaselineSummary([(f"cannot be compared: {error}", {"red": True})])
    elsewhere = another_machine(now.environment, then.environment)

    planned = frozenset(now.matrix["cells_planned"])
    here = {name: cell for name, cell in cells_now.items() if cell.verdicts}
    # A cell that this run planned and did not judge is not gone; one that is planned no more is.
    before = {name: cell for name, cell in cells_then.items() if name in here or name not in planned}
    differences = find_changes(here, before, comparable=not elsewhere)
    tests, tests_then = judge_tests(now, ours=True), judge_tests(then, ours=True)
    tests_before = {name: test for name, test in tests_then.items() if name in tests}
    differences += find_changes(tests, tests_before, comparable=False, noun="test")

    lines = list(_lines_of_environment(now, then, elsewhere))
    lines += [(change.text, _markup_of_change(change)) for change in differences[:SHOWN]]
    if len(differences) > SHOWN:
        lines.append((f"... and {len(differences) - SHOWN} more", {}))
    if not differences:
        lines.append((f"{_number_compared(len(here), len(tests))} as in the baseline", {"green": True}))
    return BaselineSummary(lines, fresh_places(differences))


def _number_compared(cells: int, tests: int) -> str:
    """``3 cells and 1 test``; tests only where there are any."""
    if tests:
        return f"{count(cells, 'cell')} and {count(tests, 'test')}"
    return count(cells, "cell")


def _lines_of_environment(now: Merged, then: Merged, elsewhere: str) -> Iterator[tuple[str, dict[str, bool]]]:
    """What software differs, which is what many differences come from; and what can't be compared."""
    for key in _SOFTWARE:
        if now.environment and then.environment.get(key) != now.environment.get(key):
            yield f"{key}: {then.environment.get(key)} -> {now.environment.get(key)}", {"yellow": True}
    if then.partial:
        yield f"the baseline is partial: {then.problems[0]}", {"yellow": True}
    if elsewhere:
        yield f"{elsewhere}; times and sizes are not compared", {"yellow": True}


def _markup_of_change(change: Change) -> dict[str, bool]:
    if change.kind in BASELINE and change.sure:
        return {"red": True}
    if change.kind in BASELINE:
        return {"yellow": True}
    if change.kind == "improved":
        return {"green": True}
    return {}
