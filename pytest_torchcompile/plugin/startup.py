"""Startup: a run with ``--compile-matrix`` is made ready, and every mistake that can be known before it is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_torchcompile.errors import ReportError, UsageError
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.plan.matrix_path import find_matrix
from pytest_torchcompile.plan.selection import refuse_idle, refuse_unknown
from pytest_torchcompile.plugin.collection import SESSION, MatrixSession
from pytest_torchcompile.plugin.outside import named_of
from pytest_torchcompile.plugin.test_lane import report_tests
from pytest_torchcompile.ranks.torchrun import Torchrun, own_file
from pytest_torchcompile.report.files import REPORT_FILE
from pytest_torchcompile.report.reading import Report, read_report
from pytest_torchcompile.run.settings import Settings

__all__ = ["start"]


def start(config: pytest.Config, settings: Settings) -> None:
    """Load the matrix and register the session's hooks. Raises UsageError for a mistake in the matrix."""
    bases = config.invocation_params.dir, config.rootpath
    matrix = load_matrix(find_matrix(settings.matrix, bases), shown=settings.matrix)
    refuse_unknown(config.getoption("markexpr"), (planned.cell.axes for planned in matrix.cells))
    named = bool(config.getoption("compile_checks"))  # for this run, not in the ini file for every matrix of a project
    given = "--compile-checks" if named else "compile_checks" if settings.checks else f"{settings.matrix}: checks"
    refuse_idle(settings.checks or matrix.checks, [planned.cell.axes for planned in matrix.cells], given, each=named)
    typed = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
    config.args, parts = named_of(typed, matrix, settings.matrix, config.invocation_params.dir, config.rootpath)
    torchrun = _torchrun(config, settings)
    worker = hasattr(config, "workerinput")
    baseline = _baseline(config, settings) if settings.baseline and not worker else None
    _switch_report_on(config)
    session = MatrixSession(config, settings, matrix, parts, torchrun, baseline, _report_path(config, torchrun))
    config.stash[SESSION] = session
    config.pluginmanager.register(session, "compile-matrix")
    if not config.option.collectonly:
        report_tests(config, session.journal)
    elif getattr(config.option, "json_report", False):
        report_tests(config, None)


def _baseline(config: pytest.Config, settings: Settings) -> Report:
    """Read the baseline before anything runs, so that a mistake in its name does not cost a run."""
    try:
        return read_report(config.invocation_params.dir / settings.baseline)
    except ReportError as error:
        raise UsageError(f"--compile-baseline: {error}") from None


def _torchrun(config: pytest.Config, settings: Settings) -> Torchrun | None:
    """What torchrun has told this process, if it is to be one rank of each cell."""
    if settings.ranks != "torchrun" or config.option.collectonly:
        return None
    if config.getoption("tx", None) or hasattr(config, "workerinput"):
        raise UsageError("--compile-ranks torchrun: every node runs the cells in the same order; leave out -n")
    return Torchrun.read(os.environ)


def _switch_report_on(config: pytest.Config) -> None:
    """Switch pytest-json-report on, without what only makes the file large, unless it was asked for."""
    option = config.option
    if not hasattr(option, "json_report") or (option.collectonly and not option.json_report):
        return  # what only lists tests leaves the report of the run before
    if not option.json_report:
        option.json_report = True
        option.json_report_omit = [*option.json_report_omit, "collectors", "keywords", "log"]


def _report_path(config: pytest.Config, torchrun: Torchrun | None) -> Path:
    """Where this run's report is, of which pytest-json-report is told."""
    option = config.option
    named = getattr(option, "json_report_file", None)
    if named and named != ".report.json":  # its default
        return Path(config.invocation_params.dir, named)
    path = own_file(config.rootpath, torchrun, REPORT_FILE)
    if named and option.json_report:
        option.json_report_file = str(path)
    return path
