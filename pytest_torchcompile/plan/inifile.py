"""The ini file that pytest would read, for commands that run without pytest. No torch, no pytest."""

from __future__ import annotations

import configparser
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pytest_torchcompile.plan.shipped import DEFAULT, PREFIX, find_matrix, is_shipped

__all__ = ["Chosen", "default_matrix", "ini_setting"]

FILES: Final[dict[str, tuple[str, ...]]] = {
    "pytest.toml": ("pytest",), ".pytest.toml": ("pytest",), "pytest.ini": ("pytest",), ".pytest.ini": ("pytest",),
    "pyproject.toml": ("tool", "pytest"), "tox.ini": ("pytest",), "setup.cfg": ("tool:pytest",),
}
"""Names in the order in which pytest looks for them in a folder, and where its settings are in each."""
_ITS_OWN: Final = frozenset({"pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"})
"""Files that are pytest's, also without a setting in them."""


class Chosen(NamedTuple):
    """A matrix that nobody has named."""

    path: Path
    """A file, or ``shipped:NAME``."""
    why: str
    """Which one it is and why, in one sentence; empty where everybody knows."""


def default_matrix(folder: Path = Path()) -> Chosen:
    """The matrix of a folder: that of the ini key compile_matrix, else matrix/default.yaml, else the one we ship.

    Raises :class:`~pytest_torchcompile.errors.UsageError` for an ini key that names a shipped matrix that is not.
    """
    if (found := ini_setting(folder, "compile_matrix")) is not None:
        value, file = found
        path = Path(value) if is_shipped(value) else find_matrix(value, (folder, file.parent))
        return Chosen(path, f"matrix: {value}, by the key compile_matrix of {file}")
    if (folder / DEFAULT).is_file():
        return Chosen(folder / DEFAULT, "")
    return Chosen(Path(f"{PREFIX}default"), f"matrix: {PREFIX}default, because there is no {DEFAULT} here")


def ini_setting(folder: Path, name: str) -> tuple[str, Path] | None:
    """The value of a setting and the file that has it; None where pytest would read no such file, or it says nothing.

    The nearest file decides, as it does for pytest without ``-c`` and ``--rootdir``.
    """
    start = Path(os.path.abspath(folder))
    for place in (start, *start.parents):
        for file in FILES:
            settings = _settings(place / file)
            if settings is not None:
                value = settings.get(name)
                return (str(value), place / file) if value else None
    return None


def _settings(file: Path) -> Mapping[str, Any] | None:
    """Pytest's settings in a file; None if it has none, or can't be read, which pytest says itself."""
    if not file.is_file():
        return None
    try:
        text = file.read_text(encoding="utf-8")
        found = _of_toml(file, text) if file.suffix == ".toml" else _of_ini(file, text)
    except (OSError, ValueError, configparser.Error):
        return None
    return {} if found is None and file.name in _ITS_OWN else found


def _of_toml(file: Path, text: str) -> Mapping[str, Any] | None:
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")  # pytest needs it as well
    found: Any = parser.loads(text)
    for key in FILES[file.name]:
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        return None
    settings = found.get("ini_options", found)
    return settings if isinstance(settings, dict) else None


def _of_ini(file: Path, text: str) -> Mapping[str, Any] | None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(text)
    (section,) = FILES[file.name]
    return dict(parser[section]) if section in parser else None
