"""From a failing sequence to a test, and what that test calls."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.fuzz.calls import DrawnCall, Sequence, code
from pytest_torchcompile.matrix import Matrix, PlannedCell, load_matrix
from pytest_torchcompile.observation import Job

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from pytest_torchcompile.fuzz.attempts import Attempts
    from pytest_torchcompile.runner import Run

__all__ = ["assert_calls", "attempts_of", "cell_sequences", "emitted"]

_TEST = '''\
# test_{name}.py
from hypothesis import Phase, example, given, settings

from pytest_torchcompile import assert_calls, call, cell_sequences

MATRIX, CELL = {matrix!r}, {cell!r}


@settings(phases=[Phase.explicit], deadline=None)
@example(calls={calls})
@given(calls=cell_sequences(MATRIX, CELL))
def test_{name}(calls):
    assert_calls(MATRIX, CELL, calls)'''


def attempts_of(run: Run) -> Attempts:
    """Attempts on the program of a cell."""
    from pytest_torchcompile.fuzz.attempts import Attempts

    return Attempts(run.make, run.pristine, run.settings, run.batch, run.loss, run.train, run.seed, run.unit, run.root,
                    run.job.limits)


def emitted(run: Run, sequence: Sequence) -> str:
    """A pytest file that runs the sequence on the cell, and looks for others once its settings are removed."""
    matrix = run.entry.where.rsplit(":", 2)[0]
    name = re.sub(r"\W+", "_", run.cell.id).strip("_")
    return _TEST.format(name=name, matrix=matrix, cell=run.cell.id, calls=code(sequence))


def cell_sequences(matrix: str | os.PathLike[str], cell: str, max_calls: int = 6) -> SearchStrategy[Sequence]:
    """:func:`~pytest_torchcompile.shape_sequences` over the dims of a cell's model.

    Raises :class:`~pytest_torchcompile.errors.UsageError` for a cell that the matrix does not have.
    """
    from pytest_torchcompile.fuzz.drawing import shape_sequences

    read, planned = _planned(matrix, cell)
    return shape_sequences(read.models[planned.cell.model].dims, max_calls, flips=planned.cell.phase == "training")


def assert_calls(matrix: str | os.PathLike[str], cell: str, calls: Iterable[DrawnCall]) -> None:
    """Run a sequence of calls on a cell of a matrix, in this process, from a fresh compiler state.

    Raises AssertionError with what the check ``fuzz`` says of it, and
    :class:`~pytest_torchcompile.errors.UsageError` for a cell that the matrix does not have.
    """
    from pytest_torchcompile.instruments.state import isolated
    from pytest_torchcompile.oracle.trial import same_random_draws
    from pytest_torchcompile.runner import Run
    from pytest_torchcompile.wrappers.protocol import load

    read, planned = _planned(matrix, cell)
    job = Job(planned.cell.to_dict(), read.models[planned.cell.model].to_dict(), str(read.root), ("fuzz",),
              planned.limits)
    entry = read.models[planned.cell.model]
    with isolated([]), same_random_draws():
        run = Run(job, planned.cell, load(planned.cell.wrapper, read.root, entry.where))
        found = attempts_of(run)(tuple(calls)).finding
    if found is not None:
        raise AssertionError(f"{cell}: {found.kind}: {found.message}\n{found.evidence}".rstrip())


def _planned(matrix: str | os.PathLike[str], cell: str) -> tuple[Matrix, PlannedCell]:
    read = load_matrix(Path(matrix))
    known = {planned.cell.id: planned for planned in read.cells}
    if cell not in known:
        raise UsageError(f"{matrix} has no cell {cell!r}; {nearest(cell, known)}")
    return read, known[cell]
