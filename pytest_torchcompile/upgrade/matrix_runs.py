"""Matrix runs: the cells of a matrix, run by pytest in one environment, with empty compile caches; and its report."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytest_torchcompile.errors import ReportError, UsageError
from pytest_torchcompile.report.merging import Merged, merge_reports
from pytest_torchcompile.report.reading import read_report
from pytest_torchcompile.report.safe_output import make_folder

__all__ = ["MatrixRun", "Start", "run_matrix"]

_JUDGED: Final = (0, 1)
"""Exit codes of pytest after a run that judged its cells."""
# The reason comes last, above pytest's summary.
_LAST_LINES: Final = 20
_CACHES: Final = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}

Start = Callable[[Sequence[str], "dict[str, str]", Path], int]
"""Runs a command with these variables, its output into this file; returns the exit code. Tests replace it."""


@dataclass(frozen=True)
class MatrixRun:
    """One run."""

    report: Path
    merged: Merged
    seconds: float


def start(command: Sequence[str], variables: dict[str, str], log: Path) -> int:
    """Run the command to its end."""
    with log.open("w", encoding="utf-8") as output:
        return subprocess.run(command, env=variables, stdout=output, stderr=subprocess.STDOUT, check=False).returncode


def run_matrix(python: str, matrix: str, report: Path, *, cells: Sequence[str] = (),
               arguments: Sequence[str] = (), begin: Start = start) -> MatrixRun:
    """Run the matrix by this Python, and read the report.

    ``cells``: only these; empty: all. ``arguments``: more of pytest's. The output is kept beside the report, and so is
    all else that a run writes: report, journal and files to run a cell again are those of the user's own last run.
    Raises :class:`~pytest_torchcompile.errors.UsageError` for a matrix that pytest does not take, and
    :class:`~pytest_torchcompile.errors.ReportError` where the run left no report of itself.
    """
    make_folder(report.parent)
    report.unlink(missing_ok=True)
    log = report.with_suffix(".log")
    command = [python, "-m", "pytest", f"--compile-matrix={matrix}", "--compile-keep-runs=0",
               f"--json-report-file={report.absolute()}", f"--compile-folder={report.parent.absolute()}",
               "-q", "-p", "no:cacheprovider"]
    command += [*arguments, *(f"{matrix}::{cell}" for cell in cells)]
    began = time.monotonic()
    # A compile that a cache answers is another thing, so each run has caches of its own, which are empty.
    with tempfile.TemporaryDirectory(prefix="upgrade-caches-") as caches:
        variables = {**os.environ, **{name: str(Path(caches, folder)) for name, folder in _CACHES.items()}}
        code = begin(command, variables, log)
    seconds = time.monotonic() - began
    if code not in _JUDGED or not report.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines() if log.is_file() else []
        said = "\n".join(lines[-_LAST_LINES:])
        text = f"upgrade: `{' '.join(command)}` ended with {code} and judged nothing; {log} has its output:\n{said}"
        # 4 is a mistake of the user's: the matrix, or a cell that is none.
        raise UsageError(text) if code == UsageError.exit_code else ReportError(text)
    return MatrixRun(report, merge_reports([read_report(str(report))]), seconds)


def progress(text: str) -> None:
    """Say what is being done: runs take minutes."""
    print(text, file=sys.stderr, flush=True)
