"""Loading: what ``module:attribute`` names, imported with a project's root folder first on the path. No torch."""

from __future__ import annotations

import contextlib
import importlib
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from pytest_torchcompile.errors import Unavailable, UsageError, nearest

__all__ = ["import_all", "kind_of", "one_line", "resolve"]


def resolve(reference: str, root: Path, where: str, *allowed: type) -> Any:
    """Return the callable that ``module:attribute`` names, with ``root`` first on ``sys.path``.

    An attribute that is an instance of one of ``allowed`` need not be callable. Raises :class:`UsageError`,
    starting with ``where``, if there is no such module or attribute, or if it is not callable.
    """
    module_name, colon, path = reference.partition(":")
    if not (module_name and colon and path):
        raise UsageError(f"{where}: {reference!r} names nothing; expected module:attribute")
    found: Any = _import(module_name, root.absolute(), where)
    for name in path.split("."):
        if not hasattr(found, name):
            known = [n for n in dir(found) if not n.startswith("_")]
            raise UsageError(f"{where}: {module_name!r} has no attribute {path!r}; {nearest(name, known)}")
        found = getattr(found, name)
    if not callable(found) and not isinstance(found, allowed):
        raise UsageError(f"{where}: {reference!r} is {kind_of(found)}; expected something callable")
    return found


def import_all(modules: tuple[str, ...], root: Path) -> None:
    """Import what can be imported; what cannot is told by :func:`resolve`, with its place in the matrix."""
    for name in modules:
        with contextlib.suppress(UsageError, Unavailable):
            _import(name, root.absolute(), "")


_ROOTS: set[str] = set()
"""The root folders that modules were looked up in, in this process."""


def _import(name: str, root: Path, where: str) -> Any:
    """Import a module; ``root`` comes first on the path, also before modules that another root brought."""
    if sys.path[:1] != [str(root)]:
        sys.path[:] = [str(root), *(folder for folder in sys.path if folder != str(root))]
        importlib.invalidate_caches()
    top = name.partition(".")[0]
    loaded = [m for m in sys.modules if m == top or m.startswith(f"{top}.")]
    if top != __name__.partition(".")[0] and ((root / f"{top}.py").is_file() or (root / top).is_dir()) \
            and any(_from_another_root(module, root) for module in loaded):
        for module in loaded:
            del sys.modules[module]
    _ROOTS.add(str(root))
    try:
        return importlib.import_module(name)
    except Unavailable:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{where}: cannot import {name!r}: {one_line(error)}") from error


def _from_another_root(module: str, root: Path) -> bool:
    """Did an earlier cell, of another matrix, find this loaded module in its own root?

    A rank process serves many cells, and two folders may each have a ``models.py``.
    """
    file = Path(getattr(sys.modules[module], "__file__", None) or ".")
    depth = module.count(".") + (file.stem == "__init__")
    if len(file.parents) <= depth:
        return False  # built in, or a namespace package
    home = file.parents[depth]
    return home != root and str(home) in _ROOTS


def one_line(error: BaseException) -> str:
    """An exception in one line: type, text, and the innermost place in a file of the user's."""
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename or '?').name}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if not f.filename.startswith("<") and Path(f.filename) != Path(__file__)
              and _IMPORTLIB not in Path(f.filename).parents]
    frames = [f for f in frames if _libraries().isdisjoint(Path(f.filename).parents)] or frames
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def _libraries() -> set[Path]:
    """Folders in which no file of the user's is."""
    torch = sys.modules.get("torch")  # one that was built from a checkout is not installed in any of these folders
    return _INSTALLED if torch is None else _INSTALLED | {Path(torch.__file__ or "").parent}


_IMPORTLIB = Path(importlib.__file__).parent
_INSTALLED = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}


def kind_of(value: Any) -> str:
    """What a value is, in a sentence about it."""
    return "None" if value is None else f"an object of type {type(value).__name__}"
