"""Shipped: the matrices that the package brings along, by name, and where a matrix that somebody named is.

``shipped:smoke`` is typed in place of a file, in options, node ids, the ini file, policies and commands. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pytest_torchcompile.errors import UsageError, nearest

__all__ = ["DEFAULT", "PREFIX", "find_matrix", "is_shipped", "names_matrix", "shipped_names", "shipped_path"]

PREFIX: Final = "shipped:"
DEFAULT: Final = "matrix/default.yaml"
"""The matrix of a repository that names none."""


def is_shipped(given: str) -> bool:
    """Whether the text names a shipped matrix, there or not."""
    return given.startswith(PREFIX)


def names_matrix(given: str) -> bool:
    """Whether the text is the name of a matrix, not of a folder or a test file."""
    return is_shipped(given) or given.endswith((".yaml", ".yml"))


def shipped_names() -> tuple[str, ...]:
    """The names of the shipped matrices, without the prefix."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def shipped_path(given: str) -> Path:
    """The file of ``shipped:NAME``. Raises :class:`UsageError` for a name that is not shipped."""
    name, known = given.removeprefix(PREFIX), shipped_names()
    if name not in known:
        raise UsageError(f"{given!r} is not a shipped matrix; {nearest(name, known)}")
    return _folder() / f"{name}.yaml"


def find_matrix(given: str, bases: Iterable[Path]) -> Path:
    """The file of a matrix as typed: a shipped one, or a path, looked up in one folder after the other.

    First where the user stands, as it was typed; then in the rootdir, as the ini file means it.

    A path that is nowhere is returned as it would be in the first folder: whoever reads it says so.
    Raises :class:`UsageError` for a shipped one that is not, and where :data:`DEFAULT` is meant and nowhere.
    """
    if is_shipped(given):
        return shipped_path(given)
    paths = [base / given for base in bases]  # an absolute path stays what it is
    for path in paths:
        if path.exists():
            return path
    if given == DEFAULT:
        raise UsageError(f"there is no {DEFAULT} in {paths[0].parent.parent}: write one, as README shows at its "
                         f"beginning, or name a shipped one, as in --compile-matrix={PREFIX}smoke "
                         f"(shipped are {', '.join(shipped_names())})")
    return paths[0]


def _folder() -> Path:
    """In a wheel the matrices are in the package; in the repository they are in its own folder ``matrix``."""
    package = Path(__file__).parent.parent
    inside = package / "matrices"
    return inside if inside.is_dir() else package.parent / "matrix"
