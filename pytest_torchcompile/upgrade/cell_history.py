"""The command ``pytest-torchcompile history``: one cell over kept reports: when did it turn, with which commit or
version; and whether it is a flake. Runs it again only if that is asked for."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.observation import BAD
from pytest_torchcompile.page.past_runs import PastRun, day_in_words, read_folder, shorten_run
from pytest_torchcompile.plan.matrix_path import is_of_model
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.flakes import Flake, find_flakes
from pytest_torchcompile.report.safe_output import harmless_text
from pytest_torchcompile.upgrade.matrix_runs import progress, run_matrix

__all__ = ["CellHistory", "CellRun", "history_of_cell", "run_command"]

_UNKNOWN = ("not_run", "skip", "")


@dataclass(frozen=True)
class CellRun:
    """What one run says of the cell."""

    label: str
    """Commit and day."""
    torch: str
    status: str
    """Empty where the cell is not in the run."""
    red: tuple[str, ...]
    """The checks that do not hold."""
    changes: tuple[str, ...]
    """What software is not as in the run before."""
    key: str

    @property
    def is_red(self) -> bool:
        """Does it fail?"""
        return self.status in BAD


@dataclass
class CellHistory:
    """One cell over the runs, the oldest first."""

    cell: str
    runs: list[CellRun]
    turns: list[int] = field(default_factory=list)
    """The runs in which it turned, from good to bad or back; runs that did not judge it are no turn."""
    flakes: list[Flake] = field(default_factory=list)

    @property
    def is_red(self) -> bool:
        """Does it fail in the last run that judged it?"""
        judged = [run for run in self.runs if run.status not in _UNKNOWN]
        return bool(judged) and judged[-1].is_red

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"cell": self.cell, "fails": self.is_red, "runs": [asdict(run) for run in self.runs],
                "turns": self.turns, "flakes": [asdict(flake) for flake in self.flakes]}


def history_of_cell(cell: str, runs: Sequence[PastRun]) -> CellHistory:
    """Follow the cell through the runs, the oldest first.

    Raises :class:`~pytest_torchcompile.errors.UsageError` for a cell that none of them has.
    """
    known: dict[str, None] = {}
    for past in runs:
        known |= dict.fromkeys(past.statuses)
    if cell not in known:
        raise UsageError(f"history: none of {count(len(runs), 'run')} has a cell {cell!r}; {nearest(cell, known)}")
    history = CellHistory(cell, list(_runs_of_cell(cell, runs)))
    last = None
    for index, run in enumerate(history.runs):
        # A run that did not judge the cell is no turn, neither to the good nor to the bad.
        if run.status in _UNKNOWN:
            continue
        if last is not None and run.is_red != last:
            history.turns.append(index)
        last = run.is_red
    sightings = []
    for past in runs:
        if cell in past.verdicts:
            sightings.append((past.keys.get(cell, ""), past.verdicts[cell]))
    history.flakes = find_flakes(sightings)
    return history


def _runs_of_cell(cell: str, runs: Sequence[PastRun]) -> Iterator[CellRun]:
    for index, run in enumerate(runs):
        changes = run.software_changes(runs[index - 1]) if index else []
        yield CellRun(run.label, str(run.environment.get("torch") or "not told"), run.statuses.get(cell, ""),
                      tuple(sorted(run.red.get(cell, ()))), tuple(changes), run.keys.get(cell, ""))


def history_lines(history: CellHistory) -> Iterator[str]:
    """What the command prints: the answer, each turn, each run, and flakes."""
    yield f"{history.cell}: {_now_in_words(history)}"
    for index in history.turns:
        run = history.runs[index]
        before = _last_judged_before(history, index)
        word = f"fails since {run.label} ({', '.join(run.red)})" if run.is_red else f"holds since {run.label}"
        with_what = f", with {', '.join(run.changes)}" if run.changes else ""
        yield f"  {word}{with_what}; before it {before.label}"
    yield ""
    for run in history.runs:
        red = f"  {', '.join(run.red)}" if run.red else ""
        yield f"  {run.label:<22} torch {run.torch:<14} {run.status or 'not in this run'}{red}"
    for flake in history.flakes:
        verdicts = count(len(set(flake.verdicts)), "verdict")
        yield (f"\nflake: {flake.check} has {verdicts} with the same code, matrix, packages and environment "
               f"({flake.key}): {', '.join(flake.verdicts)}")


def _now_in_words(history: CellHistory) -> str:
    judged = [run for run in history.runs if run.status not in _UNKNOWN]
    if not judged:
        return f"not judged in {count(len(history.runs), 'run')}"
    state = "fails" if history.is_red else "holds"
    if not history.turns:
        return f"{state} in all {count(len(judged), 'run')} that judged it"
    return f"{state} now; it turned {count(len(history.turns), 'time')} in {count(len(judged), 'run')}"


def _last_judged_before(history: CellHistory, index: int) -> CellRun:
    judged = [run for run in history.runs[:index] if run.status not in _UNKNOWN]
    return judged[-1]


def run_command(given: argparse.Namespace) -> int:
    """Print the history. Returns 1 where the cell fails in the last run that judged it, or is a flake; else 0.

    :raises ReportError: the folder has no report, or a run again left none.
    :raises UsageError: no run has the cell.
    """
    _, kept = read_folder(Path(given.folder))
    runs = list(kept.runs)
    # A wrong name is told before anything is run.
    history_of_cell(given.cell, runs)
    if given.rerun:
        runs += _run_again(given.cell, runs[-1], given.rerun)
    history = history_of_cell(given.cell, runs)
    if given.json:
        print(json.dumps(history.record(), indent=1))
    else:
        for line in (*history_lines(history), *kept.notes):
            print(harmless_text(line))
    return 1 if history.is_red or history.flakes else 0


def _run_again(cell: str, last: PastRun, times: int) -> Iterator[PastRun]:
    """Run the cell here and now, so many times, each in a pytest of its own."""
    if is_of_model(last.matrix_path):
        raise UsageError(f"history --rerun: the runs are of {last.matrix_path}, which is no matrix file; run pytest "
                         "with --compile-model again")
    with tempfile.TemporaryDirectory(prefix="history-") as folder:
        for number in range(1, times + 1):
            progress(f"{cell}: run {number} of {times}, {day_in_words(last.started)} was the last one kept")
            ran = run_matrix(sys.executable, last.matrix_path, Path(folder, f"{number}.json"), cells=[cell])
            yield shorten_run(ran.merged)
