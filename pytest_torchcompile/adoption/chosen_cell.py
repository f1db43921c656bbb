"""The cell that a command line names: one of a matrix, or that of a model without one."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_torchcompile.adoption.matrix_text import matrix_in_memory, name_of_model, text_of_model
from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.plan.expansion import PlannedCell
from pytest_torchcompile.plan.matrix import Matrix, load_matrix
from pytest_torchcompile.plan.matrix_path import default_matrix

__all__ = ["chosen_cell"]


def chosen_cell(given: argparse.Namespace) -> tuple[Matrix, PlannedCell]:
    """The cell that ``given.model`` names, and the matrix that knows its model.

    Raises :class:`UsageError` for a model or a cell that is not there.
    """
    wanted = _cell_of_test(given.model)
    if ":" in wanted:
        name = name_of_model(given.model, given.inputs or "")
        matrix = matrix_in_memory(name, text_of_model(name, Path.cwd()), Path.cwd())
        return matrix, next(planned for planned in matrix.cells if planned.cell.backend == "inductor")
    if given.inputs:
        raise UsageError("--inputs: the inputs of a cell are those of its matrix; name a model as module:factory")
    matrix = load_matrix(given.matrix or default_matrix().path)
    for planned in matrix.cells:
        if planned.cell.id == wanted:
            return matrix, planned
    ids = [planned.cell.id for planned in matrix.cells]
    raise UsageError(f"{wanted!r} is neither a cell of {matrix.path} nor module:factory; {nearest(wanted, ids)}")


def _cell_of_test(text: str) -> str:
    """The cell's part of what pytest calls a test of it; any other text as it is.

    >>> _cell_of_test("smoke.yaml::net-inductor-default-auto-none::compiles")
    'net-inductor-default-auto-none'
    """
    _file, colons, rest = text.partition("::")
    return rest.partition("::")[0] if colons else text
