"""Ending: the hooks that end a run with ``--compile-matrix``: its exit status, its report, and the summary."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from typing import Any, Final

import pytest

from pytest_torchcompile.gate.announcement import compare_with_baseline
from pytest_torchcompile.plan.matrix_path import MODEL_PREFIX, is_of_model
from pytest_torchcompile.plugin.collection import GRAPHS_KEY, SECONDS_KEY, MatrixSession
from pytest_torchcompile.plugin.kept_logs import kept_log_lines
from pytest_torchcompile.plugin.telling_axes import telling_axes
from pytest_torchcompile.quantity import first_names
from pytest_torchcompile.report.kept_runs import RUNS, keep_run
from pytest_torchcompile.report.reading import Report
from pytest_torchcompile.report.safe_output import harmless_text
from pytest_torchcompile.report.terminal import summary_lines

__all__ = ["LAST", "Ending", "SavedFile"]

LAST: Final = "last"
"""As a baseline: the newest kept run of another commit."""


class Ending:
    """Ends the run of a matrix session. ``baseline``: the report to compare with, if there is one."""

    def __init__(self, session: MatrixSession, baseline: Report | None) -> None:
        self.session, self.config, self.baseline = session, session.config, baseline
        self.journal, self.keeper = session.journal, session.keeper

    # First of all: pytest-json-report writes its file in this hook.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """A planned verdict that never came fails the run; so does a mistake in the matrix found late."""
        if not self.session.is_worker and not self.config.option.collectonly:
            if self.journal.usage_errors():
                session.exitstatus = pytest.ExitCode.USAGE_ERROR
            elif session.exitstatus == pytest.ExitCode.OK and self.journal.not_run():
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
            elif not self.session.planned and self.session.settings.shard[1] > 1 and session.exitstatus == 5:
                # No tests (5), but as planned: there are more shards than cells.
                session.exitstatus = pytest.ExitCode.OK
            self.journal.finish(int(session.exitstatus))
            self._keep_seconds()
            if hasattr(self.config, "_json_report"):
                self._take_over_saving()
            else:
                # -p no:pytest_jsonreport: our block alone.
                self._save_report({"compile_matrix": self.journal.block()})
        result = yield
        if not self.session.is_worker and not self.config.option.collectonly:
            if self._why_unsaved():
                session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
                self.journal.take_back_end()
            else:
                self._keep_run()
        if self.session.torchrun and self.session.torchrun.rank and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
            # Rank 0 says so. Of a process that fails torchrun ends all others at once, and rank 0 may not be done.
            session.exitstatus = pytest.ExitCode.OK
        return result

    def _shown_baseline(self, baseline: Report) -> str:
        if self.session.settings.baseline != LAST:
            return self.session.settings.baseline
        return os.path.relpath(baseline.name, self.config.rootpath)

    def _keep_run(self) -> None:
        """Keep the report of a whole run that came to its end; that it cannot be kept is no failure of the run."""
        if self.keeper.saved != self.keeper.report or self.journal.exit_status not in (0, 1):
            return
        # Kept runs are those of a matrix file: --compile-baseline=last must not find one of a single model.
        if is_of_model(self.session.settings.matrix):
            return
        with suppress(OSError):
            keep_run(self.session.files, self.keeper.report, self.journal.block(), self.session.settings.keep_runs)

    def _why_unsaved(self) -> str:
        """Why there is no readable report file; pytest-json-report only prints that it could not save one."""
        if self.journal.trouble.text:
            return self.journal.trouble.text
        path = self.keeper.report
        try:
            # Read back: pytest-json-report writes the file too, and a full disk leaves half of it.
            json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return f"the report {path} could not be written: {error}"
        return ""

    def _take_over_saving(self) -> None:
        """Have pytest-json-report's file written by us: it writes bit by bit, and over whatever is there."""
        plugin, indent = self.config._json_report, self.config.option.json_report_indent  # type: ignore[attr-defined]

        def save_report(_path: str) -> None:
            if not self._save_report(plugin.report, indent):
                # Else pytest-json-report says that it is saved.
                raise OSError("see below")

        plugin.save_report = save_report

    def _save_report(self, content: dict[str, Any], indent: int | None = None) -> bool:
        """Whether the report could be written."""
        save = partial(self.keeper.save, content, indent, self.journal.overtaken_by)
        return self.journal.trouble.try_writing(self.keeper.report, save)

    @pytest.hookimpl(optionalhook=True)
    def pytest_json_modifyreport(self, json_report: dict[str, Any]) -> None:
        """Add our block to pytest-json-report's file."""
        if not self.config.option.collectonly:
            json_report["compile_matrix"] = self.journal.block()

    # Outermost: what is wrong, by cause, comes last, behind pytest's list of what failed.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, Any, Any]:
        """The table of cells by backend and mode, and the causes."""
        result = yield
        if not self.config.option.collectonly:
            self._write_summary(terminalreporter)
        return result

    def _write_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        beside, fresh = None, None
        if self.baseline is not None:
            beside = compare_with_baseline(self.journal.block(), [self.baseline])
            fresh = beside.fresh
        if self.session.settings.logs:
            terminalreporter.section("torch's log", sep="-")
            for line in kept_log_lines(self.session.files, [planned.cell.id for planned in self.session.planned]):
                terminalreporter.write_line(line)
        terminalreporter.section("torch.compile matrix", sep="-")
        for line, markup in summary_lines(self.journal, fresh, telling_axes):
            terminalreporter.write_line(harmless_text(line), **markup)
        if beside is None and self.session.settings.baseline == LAST:
            terminalreporter.write_line(f"nothing to compare with: no run of another commit is kept in {RUNS}")
        if beside is not None and self.baseline is not None:
            # Of the newest of another commit the path tells the day and the commit.
            terminalreporter.section(f"beside {self._shown_baseline(self.baseline)}", sep="-")
            for line, markup in beside.lines:
                terminalreporter.write_line(line, **markup)
        if edited := self.journal.sources_edited:
            named = first_names(edited)
            text = f"sources were edited while this run went on, so the gate takes no verdict of it: {named}"
            terminalreporter.write_line(text, yellow=True)
        if self.keeper.message:
            terminalreporter.write_line(self.keeper.message)
        if is_of_model(self.session.settings.matrix):
            model, _, inputs = self.session.settings.matrix.removeprefix(MODEL_PREFIX).partition(",")
            again = f"init {model} --inputs {inputs}" if inputs else f"init {model}"
            terminalreporter.write_line(
                f"next: `pytest-torchcompile {again}` writes a matrix to keep and to change")
        if lost := self._why_unsaved():
            terminalreporter.write_line(lost, red=True)

    def _keep_seconds(self) -> None:
        # -p no:cacheprovider: there is none.
        cache = getattr(self.config, "cache", None)
        if cache is not None:
            cache.set(SECONDS_KEY, self.session.known_seconds() | self.journal.seconds())
            cache.set(GRAPHS_KEY, self.session.known_graphs() | self.journal.graphs())


class SavedFile:
    """Has pytest-json-report name the file that has this run's record, where the report stayed as it was."""

    def __init__(self, session: MatrixSession) -> None:
        self.config, self.keeper = session.config, session.keeper

    # Before pytest-json-report's own hook, which prints what it has in store.
    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self) -> None:
        """Correct the line that is about to be printed."""
        plugin, saved = getattr(self.config, "_json_report", None), self.keeper.saved
        if plugin is None or saved is None or saved == self.keeper.report:
            return
        # A private name of pytest-json-report 1.5: where it has another text there, that is left alone.
        told = f"report saved to: {self.config.option.json_report_file}"
        if getattr(plugin, "_terminal_summary", "") == told:
            plugin._terminal_summary = f"report saved to: {saved}"
