"""Outside: a matrix that pytest does not look up itself, because it is shipped, in no file, or outside the rootdir.

pytest would load every ``conftest.py`` and package on the way to such a file, and has no node id for it. So the file
hangs on the session itself, and what the command line names of it is read here. Its node is called as a shipped matrix
is, or by the file's name alone: of a path that is there pytest would take another rootdir, with other settings.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.plan.matrix import Matrix
from pytest_torchcompile.plan.matrix_path import has_name_only

__all__ = ["Named", "named_parts"]


@dataclass(frozen=True)
class Named:
    """What of the matrix is to be collected, and by whom."""

    node_id: str = ""
    """What the file's node is called; empty: pytest looks the file up, and names it itself."""
    parts: tuple[tuple[str, ...], ...] = ((),)
    """Each: the whole file (nothing), a cell, or a cell and a check of it."""

    def has(self, *names: str) -> bool:
        """Whether a cell, or a cell and a check of it, is part of what was named."""
        return any(part[:len(names)] == names[:len(part)] for part in self.parts)


def named_parts(typed: Sequence[str], matrix: Matrix, given: str, base: Path,
                rootdir: Path) -> tuple[list[str], Named]:
    """The arguments that are left for pytest to look up, and what of the matrix is to be collected.

    The matrix runs alone, or after what the command line names; not twice if that names the matrix itself.
    ``typed``: the files and folders that were typed; ``given``: the matrix as typed; ``base``: where paths begin.
    Raises :class:`UsageError` for a cell or check that is not there, as pytest does for a test.
    """
    name = given
    cells = matrix.cell_ids
    if not has_name_only(given):
        if matrix.path.is_relative_to(rootdir):
            _refuse_unknown_in(typed, base, matrix.path, cells)
            return _with_matrix(typed, base, matrix.path), Named()
        name = matrix.path.name
    others: list[str] = []
    parts: list[tuple[str, ...]] = []
    for argument in typed:
        file, *names = argument.split("::")
        if file != name and not _is_path(argument, base, matrix.path):
            others.append(argument)
            continue
        _refuse_unknown(argument, names, cells)
        parts.append(tuple(names))
    # Where nothing of it was named, all of it.
    return others, Named(name, tuple(parts) or ((),))


def _with_matrix(typed: Sequence[str], base: Path, matrix: Path) -> list[str]:
    """What was typed, with the matrix behind it unless it is named there."""
    for argument in typed:
        if _is_path(argument, base, matrix):
            return [*typed]
    return [*typed, str(matrix)]


def _refuse_unknown_in(typed: Sequence[str], base: Path, matrix: Path, cells: Collection[str]) -> None:
    """Tell what is not there in a file that pytest looks up: pytest would name no nearest cell."""
    for argument in typed:
        _, *names = argument.split("::")
        if _is_path(argument, base, matrix):
            _refuse_unknown(argument, names, cells)


def _is_path(argument: str, base: Path, path: Path) -> bool:
    """Whether the part of the argument before its first ``::`` is that file; ``..`` is taken out, as pytest does."""
    return os.path.abspath(base / argument.partition("::")[0]) == str(path)


def _refuse_unknown(argument: str, names: Sequence[str], cells: Collection[str]) -> None:
    for name, known, what in zip(names, (cells, CHECKS), ("cell", "check"), strict=False):
        if name not in known:
            raise UsageError(f"not found: {argument}: the matrix has no {what} {name!r}; {nearest(name, known)}")
    if len(names) > 2:
        raise UsageError(f"not found: {argument}: expected MATRIX::CELL::CHECK")
