"""What ``--compile-baseline`` prints at the end of a run: how it differs from an earlier report."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_torchcompile.errors import ReportError
from pytest_torchcompile.gate.baseline import another_machine, changes, fresh
from pytest_torchcompile.gate.gate import judged
from pytest_torchcompile.gate.policy import BASELINE, Policy
from pytest_torchcompile.gate.testjudged import judge_tests
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.causes import Fresh
from pytest_torchcompile.report.merging import merge_reports
from pytest_torchcompile.report.reading import Report

__all__ = ["Beside", "comparison"]

SHOWN: Final = 30


@dataclass
class Beside:
    """A run beside an earlier one."""

    lines: list[tuple[str, dict[str, bool]]]
    """What is printed, with markup."""
    fresh: Fresh = field(default_factory=Fresh)
    """What is worse than it was."""


def comparison(block: dict[str, Any], baseline: Sequence[Report]) -> Beside:
    """Compare. Only cells and tests that this run judged: others may be another shard's, or were not asked for."""
    today = datetime.date.today()
    try:
        now, then = merge_reports([Report("this run", block)]), merge_reports(baseline)
        ours, theirs = judged(now, Policy(), today), judged(then, Policy(), today)
    except ReportError as error:
        return Beside([(f"cannot be compared: {error}", {"red": True})])
    elsewhere = another_machine(now.environment, then.environment)
    planned = frozenset(now.matrix["cells_planned"])
    here = {name: cell for name, cell in ours.items() if cell.verdicts}
    found = changes(here, {name: cell for name, cell in theirs.items() if name in here or name not in planned},
                    comparable=not elsewhere)
    tests, tests_then = judge_tests(now, ours=True), judge_tests(then, ours=True)
    found += changes(tests, {name: test for name, test in tests_then.items() if name in tests}, comparable=False,
                     noun="test")
    lines = [(f"{key}: {before} -> {after}", {"yellow": True})
             for key, before, after in _moved(then.environment, now.environment)]
    if then.partial:
        lines.append((f"the baseline is partial: {then.problems[0]}", {"yellow": True}))
    if elsewhere:
        lines.append((f"{elsewhere}; times and sizes are not compared", {"yellow": True}))
    lines += [(change.text, _markup(change.kind, change.sure)) for change in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append((f"... and {len(found) - SHOWN} more", {}))
    if not found:
        lines.append((f"{_counted(len(here), len(tests))} as in the baseline", {"green": True}))
    return Beside(lines, fresh(found))


def _counted(cells: int, tests: int) -> str:
    """``3 cells and 1 test``; tests only where there are any."""
    return count(cells, "cell") + (f" and {count(tests, 'test')}" if tests else "")


def _moved(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What software differs, which is what many differences come from."""
    for key in ("torch", "triton", "python", "compiler", "cuda"):
        if now and then.get(key) != now.get(key):
            yield key, then.get(key), now.get(key)


def _markup(kind: str, sure: bool) -> dict[str, bool]:
    if kind in BASELINE:
        return {"red": True} if sure else {"yellow": True}
    return {"green": True} if kind == "improved" else {}
