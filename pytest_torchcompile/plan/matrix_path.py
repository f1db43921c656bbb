"""Which matrix file is meant: a shipped one, a path that somebody typed, or the one of this folder.

``shipped:smoke`` is typed in place of a file, in options, node ids, the ini file, policies and commands. No torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pytest_torchcompile.errors import UsageError, nearest

__all__ = ["DEFAULT", "MODEL_PREFIX", "PREFIX", "ChosenMatrix", "default_matrix", "find_matrix", "has_name_only",
           "ini_setting", "is_of_model", "is_shipped", "names_matrix", "shipped_names", "shipped_path"]

PREFIX: Final = "shipped:"
MODEL_PREFIX: Final = "model:"
"""How the name of a matrix begins that is no file, but made for one model (``--compile-model``)."""
DEFAULT: Final = "matrix/default.yaml"
"""The matrix of a repository that names none."""


def is_shipped(given: str) -> bool:
    """Whether the text names a shipped matrix, there or not."""
    return given.startswith(PREFIX)


def is_of_model(given: str) -> bool:
    """Whether the text names the matrix of one model, which is in no file."""
    return given.startswith(MODEL_PREFIX)


def has_name_only(given: str) -> bool:
    """Whether the text names a matrix that is no file of the user's: a shipped one, or that of one model."""
    return is_shipped(given) or is_of_model(given)


def names_matrix(given: str) -> bool:
    """Whether the text is the name of a matrix, not of a folder or a test file."""
    return has_name_only(given) or given.endswith((".yaml", ".yml"))


def shipped_names() -> tuple[str, ...]:
    """The names of the shipped matrices, without the prefix."""
    return tuple(sorted(path.stem for path in _matrix_folder().glob("*.yaml")))


def shipped_path(given: str) -> Path:
    """The file of ``shipped:NAME``. Raises :class:`UsageError` for a name that is not shipped."""
    name, known = given.removeprefix(PREFIX), shipped_names()
    if name not in known:
        raise UsageError(f"{given!r} is not a shipped matrix; {nearest(name, known)}")
    return _matrix_folder() / f"{name}.yaml"


def find_matrix(given: str, bases: Iterable[Path]) -> Path:
    """The file of a matrix as typed: a shipped one, or a path, looked up in one folder after the other.

    First where the user stands, as it was typed; then in the rootdir, as the ini file means it.

    A path that is nowhere is returned as it would be in the first folder: whoever reads it says so.
    Raises :class:`UsageError` for a shipped one that is not, and where :data:`DEFAULT` is meant and nowhere.
    """
    if is_shipped(given):
        return shipped_path(given)
    # An absolute path stays what it is.
    paths = [base / given for base in bases]
    for path in paths:
        if path.exists():
            return path
    if given == DEFAULT:
        raise UsageError(f"there is no {DEFAULT} in {paths[0].parent.parent}: `pytest-torchcompile init module:Class` "
                         "writes one for your model, --compile-model=module:Class does without, and "
                         f"--compile-matrix={PREFIX}smoke names a shipped one (shipped are "
                         f"{', '.join(shipped_names())})")
    return paths[0]


def _matrix_folder() -> Path:
    """In a wheel the matrices are in the package; in the repository they are in its own folder ``matrix``."""
    package = Path(__file__).parent.parent
    inside = package / "matrices"
    if inside.is_dir():
        return inside
    return package.parent / "matrix"


# The matrix that nobody has named: the ini file that pytest would read, for commands that run without pytest.

FILES: Final[dict[str, tuple[str, ...]]] = {
    "pytest.toml": ("pytest",), ".pytest.toml": ("pytest",), "pytest.ini": ("pytest",), ".pytest.ini": ("pytest",),
    "pyproject.toml": ("tool", "pytest"), "tox.ini": ("pytest",), "setup.cfg": ("tool:pytest",),
}
"""Names in the order in which pytest looks for them in a folder, and where its settings are in each."""
_ITS_OWN: Final = frozenset({"pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"})
"""Files that are pytest's, also without a setting in them."""


class ChosenMatrix(NamedTuple):
    """A matrix that nobody has named."""

    path: Path
    """A file, or ``shipped:NAME``."""
    why: str
    """Which one it is and why, in one sentence; empty where everybody knows."""


def default_matrix(folder: Path = Path()) -> ChosenMatrix:
    """The matrix of a folder: that of the ini key compile_matrix, else matrix/default.yaml, else the one we ship.

    Raises :class:`~pytest_torchcompile.errors.UsageError` for an ini key that names a shipped matrix that is not.
    """
    setting = ini_setting(folder, "compile_matrix")
    if setting is not None:
        value, file = setting
        path = Path(value)
        # A shipped one keeps its name, by which messages and reports tell it.
        if not is_shipped(value):
            path = find_matrix(value, (folder, file.parent))
        return ChosenMatrix(path, f"matrix: {value}, by the key compile_matrix of {file}")
    if (folder / DEFAULT).is_file():
        return ChosenMatrix(folder / DEFAULT, "")
    return ChosenMatrix(Path(f"{PREFIX}default"), f"matrix: {PREFIX}default, because there is no {DEFAULT} here")


def ini_setting(folder: Path, name: str) -> tuple[str, Path] | None:
    """The value of a setting and the file that has it; None where pytest would read no such file, or it says nothing.

    The nearest file decides, as it does for pytest without ``-c`` and ``--rootdir``.
    """
    start = Path(os.path.abspath(folder))
    for place in (start, *start.parents):
        for file in FILES:
            settings = _settings_in(place / file)
            if settings is not None:
                value = settings.get(name)
                # The nearest file decides even if it says nothing: pytest does not look further either.
                if not value:
                    return None
                return str(value), place / file
    return None


def _settings_in(file: Path) -> Mapping[str, Any] | None:
    """Pytest's settings in a file; None if it has none, or can't be read, which pytest says itself."""
    if not file.is_file():
        return None
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".toml":
            settings = _settings_in_toml(file, text)
        else:
            settings = _settings_in_ini(file, text)
    # pytest reads the same file, and tells of its mistakes in its own words.
    except (OSError, ValueError):
        return None
    if settings is None and file.name in _ITS_OWN:
        return {}
    return settings


def _settings_in_toml(file: Path, text: str) -> Mapping[str, Any] | None:
    # Where Python has no tomllib, pytest needs tomli as well.
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    table: Any = parser.loads(text)
    for key in FILES[file.name]:
        if not isinstance(table, dict):
            return None
        table = table.get(key)
    if not isinstance(table, dict):
        return None
    settings = table.get("ini_options", table)
    if isinstance(settings, dict):
        return settings
    return None


def _settings_in_ini(file: Path, text: str) -> Mapping[str, Any] | None:
    import configparser

    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise ValueError(str(error)) from None
    (section,) = FILES[file.name]
    if section not in parser:
        return None
    return dict(parser[section])
