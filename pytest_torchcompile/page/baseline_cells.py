"""What the map and a cell's article say of a baseline; what the gate makes of it is a finding."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Final

from pytest_torchcompile.gate.baseline import Change, another_machine, find_changes
from pytest_torchcompile.gate.gate import GateOutcome, judge_cells
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.page.markup import Html, badge, join, tag
from pytest_torchcompile.report.merging import Merged

__all__ = ["MARKS", "BaselineCells", "compare_cells"]

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
