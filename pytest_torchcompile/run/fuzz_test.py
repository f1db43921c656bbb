"""What a test that the fuzzer wrote calls: sequences of calls on a cell of a matrix, in this process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.fuzz.cell_search import attempts_of
from pytest_torchcompile.fuzz.drawn_call import DrawnCall, Sequence
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.matrix import Matrix, PlannedCell, load_matrix

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["assert_calls", "cell_sequences"]


def cell_sequences(matrix: str | os.PathLike[str], cell: str, max_calls: int = 6) -> SearchStrategy[Sequence]:
    """:func:`~pytest_torchcompile.shape_sequences` over the dims of a cell's model.

    Raises :class:`~pytest_torchcompile.errors.UsageError` for a cell that the matrix does not have.
    """
    from pytest_torchcompile.fuzz.drawn_call import shape_sequences

    read, planned = _find_cell(matrix, cell)
    return shape_sequences(read.models[planned.cell.model].dims, max_calls, flips=planned.cell.phase == "training")


def assert_calls(matrix: str | os.PathLike[str], cell: str, calls: Iterable[DrawnCall]) -> None:
    """Run a sequence of calls on a cell of a matrix, in this process, from a fresh compiler state.

    Raises AssertionError with what the check ``fuzz`` says of it, and
    :class:`~pytest_torchcompile.errors.UsageError` for a cell that the matrix does not have.
    """
    from pytest_torchcompile.run.runner import Run
    from pytest_torchcompile.state.torch_state import isolated, same_random_draws
    from pytest_torchcompile.wrappers.protocol import load

    read, planned = _find_cell(matrix, cell)
    job = Job(planned.cell.to_dict(), read.models[planned.cell.model].to_dict(), str(read.root), ("fuzz",),
              planned.limits)
    entry = read.models[planned.cell.model]
    with isolated([]), same_random_draws():
        run = Run(job, planned.cell, load(planned.cell.wrapper, read.root, entry.where))
        problem = attempts_of(run)(tuple(calls)).problem
    if problem is not None:
        raise AssertionError(f"{cell}: {problem.kind}: {problem.message}\n{problem.evidence}".rstrip())


def _find_cell(matrix: str | os.PathLike[str], cell: str) -> tuple[Matrix, PlannedCell]:
    read = load_matrix(Path(matrix))
    known = {planned.cell.id: planned for planned in read.cells}
    if cell not in known:
        raise UsageError(f"{matrix} has no cell {cell!r}; {nearest(cell, known)}")
    return read, known[cell]
