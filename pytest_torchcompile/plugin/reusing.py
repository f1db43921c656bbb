"""Reusing: the hooks of a run with ``--compile-reuse``. Each pytest process looks a cell up when its first item runs.

Rank processes are started when the first cell has to be run, so that a run in which nothing has changed imports no
torch. Under xdist the controller looks every cell up beforehand, for its workers share the rank processes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_torchcompile.plugin.rank_supply import RankSupply
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.ranks.execution import CellResult
from pytest_torchcompile.report.provenance import git_state
from pytest_torchcompile.report.record import utc_time
from pytest_torchcompile.report.safe_output import REUSED, make_folder
from pytest_torchcompile.reuse.cell_reuse import CellReuse
from pytest_torchcompile.reuse.code_reuse import CodeReuse

if TYPE_CHECKING:
    from pytest_torchcompile.plugin.collection import MatrixSession

__all__ = ["Reusing", "lines_of_causes"]

_MOST_CAUSES: Final = 10
"""Causes that are told without ``-v``."""


class Reusing:
    """Gives the execution of cells what earlier runs have kept, and says at the end what came of it."""

    def __init__(self, session: MatrixSession) -> None:
        self.session = session
        self._began = utc_time()
        supply = session.config.pluginmanager.getplugin("compile-matrix-ranks")
        execution = session.execution
        execution.reuse = CellReuse(session.files / REUSED, self._describe_run)
        if session.settings.reuse == "code":
            execution.code_reuse = CodeReuse(execution.reuse)
        if isinstance(supply, RankSupply):
            execution.start_ranks = supply.start_for_cell
            supply.is_any_needed = self._must_any_run

    def _describe_run(self) -> dict[str, Any]:
        """What a kept result tells of this run."""
        git = git_state(self.session.matrix.root) or {"commit": None, "changed": False}
        return {"run": self._began, "commit": git["commit"], "changed": git["changed"]}

    def _must_any_run(self) -> bool:
        """Is there a cell without a result that still holds? Of those that are deselected nobody knows yet."""
        session = self.session
        for planned in session.planned:
            if planned.outcome == "skip":
                continue
            checks = session.matrix.checks_of(planned, session.settings.checks)
            if not isinstance(session.execution.earlier_result(planned, checks), CellResult):
                return True
        return False

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Hide the folder from git."""
        folder = self.session.files / REUSED
        self.session.journal.trouble.try_writing(folder, lambda: make_folder(folder))

    # Behind the summary of the matrix, which is outermost too and registered before.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, Any, Any]:
        """Say why the other cells were run, or are not kept."""
        result = yield
        most: int | None = _MOST_CAUSES
        if self.session.config.get_verbosity() >= 1:
            most = None
        journal = self.session.journal
        # A cell that compiled to the same code was run too, but counts as reused.
        reused = journal.reused()
        why_run = {cell: why for cell, why in journal.why_run.items() if cell not in reused}
        for line in lines_of_causes(why_run, most):
            terminalreporter.write_line(line)
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Keep the folder within its bounds; workers leave that to the controller."""
        reuse = self.session.execution.reuse
        if not self.session.is_worker and reuse is not None:
            reuse.store.tidy()


def lines_of_causes(why_run: Mapping[str, str], most: int | None = None) -> Iterator[str]:
    """A line for each cause for which cells were run, that of most cells first. ``why_run``: by cell.

    ``most``: lines, beyond which there is one that says how many causes it leaves out.
    """
    by_cause: dict[str, list[str]] = {}
    for cell, why in why_run.items():
        by_cause.setdefault(why, []).append(cell)
    # Cells of one cause stand in the order of the run.
    causes = sorted(by_cause, key=lambda why: len(by_cause[why]), reverse=True)
    for why in causes[:most]:
        yield f"{count(len(by_cause[why]), 'cell')} not reused: {why}: {first_names(by_cause[why])}"
    left = causes[len(causes[:most]):]
    if left:
        cells = sum(len(by_cause[why]) for why in left)
        yield f"{count(cells, 'cell')} not reused for {count(len(left), 'other cause')}; -v shows them"
