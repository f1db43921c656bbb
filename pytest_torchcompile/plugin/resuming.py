"""Resuming: the hooks of ``--compile-resume``. A run that was interrupted goes on with the cells that it left.

Its report stays, and the cells of this run are taken over into it, as those of any part of a matrix are.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pytest_torchcompile.errors import ReportError
from pytest_torchcompile.observation import verdicts_in
from pytest_torchcompile.plugin.collection import CheckItem, MatrixSession
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.reading import Report, read_report
from pytest_torchcompile.run.imported import edited_since

__all__ = ["Resuming", "judged_cells_of", "why_not_to_resume"]


def judged_cells_of(report: Report) -> set[str]:
    """The cells of which the run judged every check that it was to judge."""
    judged = set()
    for cell in report.cells:
        verdicts = verdicts_in(cell["checks"])
        if cell["selected"] and verdicts and "not_run" not in verdicts:
            judged.add(cell["id"])
    return judged


def why_not_to_resume(report: Report, matrix_sha256: str, edited: Sequence[str]) -> str:
    """Why the rest of that run cannot be run now; empty if it can. ``edited``: sources that are not as they were."""
    if report.block["matrix"]["sha256"] != matrix_sha256:
        return "is of another matrix, or of one that was edited since"
    if edited:
        return f"is of other sources, for these were edited since: {first_names(edited)}"
    return ""


class Resuming:
    """Leaves out what the report has already; workers of xdist do so too, each for itself."""

    def __init__(self, session: MatrixSession) -> None:
        self.session = session
        self._judged = self._read_judged()
        """Read at once: whatever is wrong with the report is told before anything runs."""

    def _read_judged(self) -> set[str]:
        path, matrix = self.session.keeper.report, self.session.matrix
        advice = "leave out --compile-resume to run all"
        if not path.is_file():
            raise pytest.UsageError(f"--compile-resume: there is no report {path}, so nothing to go on with; {advice}")
        try:
            report = read_report(path)
        except ReportError as error:
            raise pytest.UsageError(f"--compile-resume: {error}; {advice}") from None
        imported = (report.block["run"] or {}).get("sources", {})
        why_not = why_not_to_resume(report, matrix.sha256, edited_since(matrix.root, imported))
        if why_not:
            raise pytest.UsageError(f"--compile-resume: {path} {why_not}; {advice}")
        return judged_cells_of(report)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the items of cells that are judged."""
        judged: list[pytest.Item] = []
        left: list[pytest.Item] = []
        for item in items:
            is_judged = isinstance(item, CheckItem) and item.parent.name in self._judged
            (judged if is_judged else left).append(item)
        if judged:
            config.hook.pytest_deselected(items=judged)
            # In place: pytest and other plugins hold this very list.
            items[:] = left

    def pytest_report_header(self) -> str:
        """How much there was."""
        return f"compile matrix: {count(len(self._judged), 'cell is', 'cells are')} judged already, and not run again"
