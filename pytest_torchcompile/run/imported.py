"""Imported: the source files of the user's project that this process has imported, each with a hash. No torch.

Git does not know all of them: a model may lie outside the repository, or be ignored by it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

__all__ = ["edited_since", "hash_of", "imported_sources"]

MOST: Final = 5000
"""Files that are told of."""
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_VERSIONED: Final = frozenset({"pytest_torchcompile", "torch", "torchgen", "functorch", "triton"})
"""Packages that a report tells by version or commit. torch also makes modules of what it compiles."""
_STANDARD: Final = tuple(f"{os.path.realpath(sysconfig.get_path(name))}{os.sep}" for name in ("stdlib", "platstdlib"))
_first_seen: dict[str, str] = {}
"""File to its hash when this process first saw it, which is what it has imported: it may be edited later."""


def imported_sources(root: Path, named: Iterable[str] = ()) -> dict[str, str]:
    """Path from ``root`` to the hash of each Python file that the project's modules were imported from.

    Installed packages are no part of the project, unless one of the modules ``named`` is theirs.
    """
    packages = {module.partition(".")[0] for module in named}
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        package = name.partition(".")[0]
        if not isinstance(file, str) or not file.endswith(".py") or package in _VERSIONED:
            continue
        if _is_installed(file) and package not in packages:
            continue
        # Hashed when it is first seen: later the file may not be what was imported.
        if file not in _first_seen:
            _first_seen[file] = hash_of(Path(file))
        if _first_seen[file]:
            found[Path(os.path.relpath(file, root)).as_posix()] = _first_seen[file]
    return dict(sorted(found.items())[:MOST])


def edited_since(root: Path, sources: Mapping[str, str]) -> list[str]:
    """The files that are not any more, or are gone, as they were imported."""
    edited = []
    for name, known in sources.items():
        # As text, for `..` of a link is not where the link is.
        file = Path(os.path.normpath(root / name))
        if hash_of(file) != known:
            edited.append(name)
    return edited


@functools.cache
def _is_installed(file: str) -> bool:
    real = os.path.realpath(file)
    return not _INSTALLED.isdisjoint(Path(real).parts) or real.startswith(_STANDARD)


def hash_of(path: Path) -> str:
    """Of a file's bytes; empty where there is no such file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    # Empty is unlike every hash, so that a file that is gone counts as edited.
    except (OSError, ValueError):
        return ""
