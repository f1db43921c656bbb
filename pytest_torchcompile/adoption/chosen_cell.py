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
    file, wanted = _file_and_cell(given.model)
    if ":" in wanted:
        name = name_of_model(given.model, given.inputs or "")
        matrix = matrix_in_memory(name, text_of_model(name, Path.cwd()), Path.cwd())
        return matrix, next(planned for planned in matrix.cells if planned.cell.backend == "inductor")
    if given.inputs:
        raise UsageError("--inputs: the inputs of a cell are those of its matrix; name a model as module:factory")
    if file and given.matrix and Path(file).name != Path(given.matrix).name:
        raise UsageError(f"{given.model!r} is a test of {file}, and --matrix names {given.matrix}; leave one of them "
                         "out")
    matrix = load_matrix(given.matrix or file or default_matrix().path)
    for planned in matrix.cells:
        if planned.cell.id == wanted:
            return matrix, planned
    ids = [planned.cell.id for planned in matrix.cells]
    other = "" if given.matrix or file else "; name another matrix by --matrix FILE, or the cell as FILE::CELL"
    raise UsageError(f"{wanted!r} is neither a cell of {matrix.path} nor module:factory; {nearest(wanted, ids)}{other}")


def _file_and_cell(text: str) -> tuple[str, str]:
    """The matrix and the cell of what pytest calls a test; of any other text no matrix, and the text as it is.

    >>> _file_and_cell("matrix/smoke.yaml::net-inductor-default-auto-none::compiles")
    ('matrix/smoke.yaml', 'net-inductor-default-auto-none')
    >>> _file_and_cell("net-inductor-default-auto-none::compiles")
    ('', 'net-inductor-default-auto-none')
    >>> _file_and_cell("models:build")
    ('', 'models:build')
    """
    file, colons, rest = text.partition("::")
    if not colons:
        return "", text
    if file.startswith("shipped:") or Path(file).suffix in (".yaml", ".yml"):
        return file, rest.partition("::")[0]
    # Of a cell, without its file, one check.
    return "", file
