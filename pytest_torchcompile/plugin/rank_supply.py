"""RankSupply: the hooks by which the pytest processes of a run come to rank processes, and say where there are none.

The pytest that sees all verdicts owns the run's folder (:mod:`~pytest_torchcompile.ranks.zygotes`); workers are
told it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_torchcompile.plugin.kept_logs import log_folder, start_logs_anew
from pytest_torchcompile.ranks.execution import Execution
from pytest_torchcompile.ranks.starting import RankProcesses, open_processes
from pytest_torchcompile.report.code_changes import CodeStore
from pytest_torchcompile.report.safe_output import CODE, FOLDER
from pytest_torchcompile.run.settings import Settings

__all__ = ["CellNotRun", "RankSupply"]

ZYGOTE: Final = "compile_zygote"
UNABLE: Final = "compile_unable"
NOT_RUN: Final = "compile_not_run"
"""The attribute of a test report whose cell was not run. Of thousands each would be told at length as a failure."""


class CellNotRun(Exception):
    """No rank process could be had for the cell; the text is one sentence."""


class RankSupply:
    """Starts what starts rank processes when it is needed, and ends every process with the run."""

    def __init__(self, config: pytest.Config, settings: Settings, execution: Execution, files: Path) -> None:
        """``files``: the folder with ``.compile-matrix``."""
        self.config, self.settings, self.execution = config, settings, execution
        self.processes: RankProcesses | None = None
        self.code = CodeStore(files / FOLDER / CODE)
        execution.keep_code = self.code.keep
        if settings.logs:
            execution.log_folder = str(log_folder(files))
        # What xdist gives to a worker.
        given: dict[str, Any] | None = getattr(config, "workerinput", None)
        self.is_worker = given is not None
        if settings.logs and not self.is_worker and not config.option.collectonly:
            start_logs_anew(files)
        if given is not None:
            execution.workers = int(given["workercount"])
            # Empty where cells run in the workers themselves, or where no folder could be made.
            execution.folder = None
            if given[ZYGOTE]:
                execution.folder = Path(given[ZYGOTE])
            execution.unable = given[UNABLE]
        self.is_any_needed: Callable[[], bool] = lambda: True
        """Is there a cell that must be run? Where results are reused, :class:`.Reusing` can tell."""

    # Optional: xdist may be switched off.
    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give each worker the folder that all share, unless it is seen that none will be needed."""
        if not self._may_need_none or self.is_any_needed():
            self._start_processes()
        node.workerinput[ZYGOTE] = str(self.execution.folder or "")
        node.workerinput[UNABLE] = self.execution.unable

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Without xdist this process runs the cells: start importing torch while the matrix is collected."""
        distributed = bool(self.config.getoption("tx", None))
        if not self.is_worker and not distributed and not self.config.option.collectonly and not self._may_need_none:
            self._start_processes()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Mark what was not run, for the controller too."""
        report = yield
        if call.excinfo is not None and isinstance(call.excinfo.value, CellNotRun):
            setattr(report, NOT_RUN, True)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Any:
        """Count what was not run apart from failures, so that the end of the run says once why."""
        if getattr(report, NOT_RUN, False):
            return "not run", "E", ("NOT RUN", {"red": True})
        return None

    # Behind the summary of the matrix, which is outermost too and registered before.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, Any, Any]:
        """Say that what starts rank processes was killed, though it may have cost nothing."""
        result = yield
        if self.processes is not None and self.processes.was_replaced:
            terminalreporter.write_line(
                "the process that starts rank processes was killed, perhaps for want of memory, and started again",
                yellow=True)
        return result

    def pytest_unconfigure(self) -> None:
        """End every process that was started."""
        self.execution.close()
        if self.processes is not None:
            self.processes.close()
        if not self.is_worker:
            self.code.tidy()

    @property
    def _may_need_none(self) -> bool:
        """Where results are reused, the first cell that is run asks for rank processes."""
        return self.execution.reuse is not None

    def start_for_cell(self) -> None:
        """See to it that there are rank processes, for a cell that was not expected to be run."""
        if self.execution.folder is None:
            self._start_processes()

    def _start_processes(self) -> None:
        if self.settings.inprocess or self.processes is not None or self.execution.unable:
            return
        # It imports torch meanwhile: nobody waits for it before the first cell.
        try:
            self.processes = open_processes(self.settings.timeout)
        # Noted and not raised: each cell then says so, and the report is whole.
        except OSError as error:
            self.execution.unable = f"no folder for rank processes could be made: {error}"
            return
        self.execution.folder = self.processes.folder
