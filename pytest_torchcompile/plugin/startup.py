"""Startup: a run with ``--compile-matrix`` is made ready, and every mistake that can be known before it is told."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_torchcompile.adoption.matrix_text import matrix_in_memory, text_of_model
from pytest_torchcompile.errors import ReportError, UsageError
from pytest_torchcompile.plan.matrix import Matrix, load_matrix
from pytest_torchcompile.plan.matrix_path import find_matrix, is_of_model
from pytest_torchcompile.plan.selection import refuse_idle, refuse_unknown
from pytest_torchcompile.plugin.collection import MATRIX_TEXT, SESSION, TEXT_OF_MATRIX, MatrixSession
from pytest_torchcompile.plugin.ending import LAST, Ending, SavedFile
from pytest_torchcompile.plugin.outside import named_parts
from pytest_torchcompile.plugin.progress_line import ProgressHooks
from pytest_torchcompile.plugin.rank_supply import RankSupply
from pytest_torchcompile.plugin.repeated import RepeatedFailures
from pytest_torchcompile.plugin.resuming import Resuming
from pytest_torchcompile.plugin.reusing import Reusing
from pytest_torchcompile.plugin.test_lane import report_tests
from pytest_torchcompile.ranks.torchrun import Torchrun, own_file
from pytest_torchcompile.report.kept_runs import newest_of_other_commit
from pytest_torchcompile.report.provenance import head_commit
from pytest_torchcompile.report.reading import Report, read_report
from pytest_torchcompile.report.safe_output import FOLDER, MODEL_FOLDER, REPORT_FILE
from pytest_torchcompile.run.settings import Settings

__all__ = ["refuse_options", "start_matrix", "words_of_ids"]

_REFUSED: Final = {
    "forked": "--forked ends the process of an item with it, so a cell could not be run once for all of its checks; "
              "leave it out: every cell has a process of its own",
    "flake_finder_enable": "--flake-finder repeats test functions, and a check of a cell is none; leave it out, or run "
                           "the tests without --compile-matrix",
}
"""Destination of another plugin's option to why it can't go with a matrix, and what to do.

A cell is run once, in a process of its own, and each of its checks is an item that judges that run. Plugins that repeat
or fork items mean test functions, which run something whenever they are called.
"""


def refuse_options(option: Callable[[str, Any], Any]) -> None:
    """Refuse what can't go with a matrix. ``option``: gives an option of the run, or the default handed to it.

    Raises :class:`~pytest_torchcompile.errors.UsageError`.
    """
    for name, text in _REFUSED.items():
        if option(name, False):
            raise UsageError(text)
    words = words_of_ids(option("keyword", "") or "")
    if "=" in words:
        raise UsageError(_text_of_equals(words))


def words_of_ids(words: str) -> str:
    """The words of ``-k`` with parts of ids as pytest's grammar takes them: each cell is known by that spelling too.

    >>> words_of_ids("net-eager-hidden=32 or not hidden=8")
    'net-eager-hidden-32 or not hidden-8'
    """
    return re.sub(r"(?<=[\w.])=(?=[\w.+-])", "-", words)


def _text_of_equals(words: str) -> str:
    """What to type in place of ``-k "backend == 'eager'"``, which no id has in it."""
    found = re.search(r"([\w.]+)\s*=+\s*[\"']?([\w.]*)", words)
    axis, value = found.groups() if found else ("hidden", "32")
    exact = value if value.isdigit() else f"'{value}'"
    return (f"-k {words!r}: pytest takes no `=` there; expected -m \"compile_cell({axis}={exact})\", for exactly those "
            f"cells, or -k {axis}-{value}, for an axis of your own")


def start_matrix(config: pytest.Config, settings: Settings) -> None:
    """Load the matrix and register the session's hooks. Raises UsageError for a mistake in the matrix."""
    bases = config.invocation_params.dir, config.rootpath
    config.option.keyword = words_of_ids(config.option.keyword)
    if is_of_model(settings.matrix):
        matrix = _matrix_of_model(config, settings.matrix)
    else:
        matrix = load_matrix(find_matrix(settings.matrix, bases), shown=settings.matrix)
    refuse_unknown(config.getoption("markexpr"), (planned.cell.axes for planned in matrix.cells))
    _refuse_idle_checks(config, settings, matrix)
    typed: list[str] = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
    config.args, parts = named_parts(typed, matrix, settings.matrix, config.invocation_params.dir, config.rootpath)
    torchrun = _read_torchrun(config, settings)
    files = _folder_of_files(config, settings)
    baseline = None
    # The summary is the controller's: workers of xdist have no use for it.
    if settings.baseline and not hasattr(config, "workerinput"):
        baseline = _read_baseline(config, settings, files)
    _switch_report_on(config)
    # A run of one model must leave the report of the repository's matrix, and its marks, alone.
    folder = MODEL_FOLDER if is_of_model(settings.matrix) else FOLDER
    report = _report_path(config, torchrun, files / folder)
    session = MatrixSession(config, settings, matrix, parts, torchrun, report, files, folder)
    config.stash[SESSION] = session
    config.pluginmanager.register(session, "compile-matrix")
    config.pluginmanager.register(Ending(session, baseline), "compile-matrix-ending")
    config.pluginmanager.register(SavedFile(session), "compile-matrix-saved")
    config.pluginmanager.register(RankSupply(config, settings, session.execution, files), "compile-matrix-ranks")
    if not session.is_worker and not config.option.collectonly:
        config.pluginmanager.register(RepeatedFailures(), "compile-matrix-repeated")
        config.pluginmanager.register(ProgressHooks(session), "compile-matrix-progress")
    if settings.resume and not config.option.collectonly:
        config.pluginmanager.register(Resuming(session), "compile-matrix-resume")
    if settings.reuse and not config.option.collectonly:
        config.pluginmanager.register(Reusing(session), "compile-matrix-reuse")
    if not config.option.collectonly:
        report_tests(config, session.journal)
    elif getattr(config.option, "json_report", False):
        report_tests(config, None)


def _matrix_of_model(config: pytest.Config, name: str) -> Matrix:
    """The matrix that is made for one model, by the controller; workers of xdist are handed its text."""
    base = config.invocation_params.dir
    handed = getattr(config, "workerinput", {}).get(MATRIX_TEXT)
    text = str(handed or text_of_model(name, base))
    config.stash[TEXT_OF_MATRIX] = text
    return matrix_in_memory(name, text, base)


def _refuse_idle_checks(config: pytest.Config, settings: Settings, matrix: Matrix) -> None:
    """Refuse checks that no cell has use for; each one where they were asked for on the command line.

    Those of an ini file are for every matrix of a project, so that one of them with a use will do.
    """
    asked_now = bool(config.getoption("compile_checks"))
    if asked_now:
        where = "--compile-checks"
    elif settings.checks:
        where = "compile_checks"
    else:
        where = f"{settings.matrix}: checks"
    axes = [planned.cell.axes for planned in matrix.cells]
    refuse_idle(settings.checks or matrix.checks, axes, where, each=asked_now)


def _folder_of_files(config: pytest.Config, settings: Settings) -> Path:
    """What ``.compile-matrix`` lies in. As typed, a folder is looked up where the user stands."""
    if not settings.folder:
        return config.rootpath
    return config.invocation_params.dir / settings.folder


def _read_baseline(config: pytest.Config, settings: Settings, files: Path) -> Report | None:
    """Read the baseline before anything runs, so that a mistake in its name does not cost a run.

    None for ``last``, where no run of another commit is kept; the summary says so.
    """
    path: Path | None = config.invocation_params.dir / settings.baseline
    if settings.baseline == LAST:
        path = newest_of_other_commit(files, head_commit(config.rootpath) or "", settings.shard)
    if path is None:
        return None
    try:
        return read_report(path)
    except ReportError as error:
        raise UsageError(f"--compile-baseline: {error}") from None


def _read_torchrun(config: pytest.Config, settings: Settings) -> Torchrun | None:
    """What torchrun has told this process, if it is to be one rank of each cell."""
    if settings.ranks != "torchrun" or config.option.collectonly:
        return None
    if config.getoption("tx", None) or hasattr(config, "workerinput"):
        raise UsageError("--compile-ranks torchrun: every node runs the cells in the same order; leave out -n")
    return Torchrun.read(os.environ)


def _switch_report_on(config: pytest.Config) -> None:
    """Switch pytest-json-report on, without what only makes the file large, unless it was asked for."""
    option = config.option
    if not hasattr(option, "json_report"):
        return
    # What only lists tests leaves the report of the run before.
    if option.collectonly and not option.json_report:
        return
    if not option.json_report:
        option.json_report = True
        option.json_report_omit = [*option.json_report_omit, "collectors", "keywords", "log"]


def _report_path(config: pytest.Config, torchrun: Torchrun | None, folder: Path) -> Path:
    """Where this run's report is, of which pytest-json-report is told."""
    option = config.option
    named = getattr(option, "json_report_file", None)
    # Its own default is as good as nothing: our report has a place of its own.
    if named and named != ".report.json":
        return Path(config.invocation_params.dir, named)
    path = own_file(folder, torchrun, Path(REPORT_FILE).name)
    if named and option.json_report:
        option.json_report_file = str(path)
    return path
