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
    value: Any = _import_module(module_name, root.absolute(), where)
    for name in path.split("."):
        if not hasattr(value, name):
            known = [other for other in dir(value) if not other.startswith("_")]
            raise UsageError(f"{where}: {module_name!r} has no attribute {path!r}; {nearest(name, known)}")
        value = getattr(value, name)
    if not callable(value) and not isinstance(value, allowed):
        raise UsageError(f"{where}: {reference!r} is {kind_of(value)}; expected something callable")
    return value


def import_all(modules: tuple[str, ...], root: Path) -> None:
    """Import what can be imported; what cannot is told by :func:`resolve`, with its place in the matrix."""
    for name in modules:
        with contextlib.suppress(UsageError, Unavailable):
            _import_module(name, root.absolute(), "")


_ROOTS: set[str] = set()
"""The root folders that modules were looked up in, in this process."""


def _import_module(name: str, root: Path, where: str) -> Any:
    """Import a module; ``root`` comes first on the path, also before modules that another root brought."""
    # First, not only somewhere: a folder before it may have a module of the same name.
    if sys.path[:1] != [str(root)]:
        sys.path[:] = [str(root), *(folder for folder in sys.path if folder != str(root))]
        importlib.invalidate_caches()
    _forget_other_roots(name.partition(".")[0], root)
    _ROOTS.add(str(root))
    try:
        return importlib.import_module(name)
    except Unavailable:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{where}: cannot import {name!r}: {one_line(error)}") from error


def _forget_other_roots(top: str, root: Path) -> None:
    """Forget a package that was imported from another root, if this one has it as well."""
    own = (root / f"{top}.py").is_file() or (root / top).is_dir()
    # This package itself may well lie in the root, in a checkout of it.
    if not own or top == __name__.partition(".")[0]:
        return
    loaded = [module for module in sys.modules if module == top or module.startswith(f"{top}.")]
    if any(_from_another_root(module, root) for module in loaded):
        for module in loaded:
            del sys.modules[module]


def _from_another_root(module: str, root: Path) -> bool:
    """Did an earlier cell, of another matrix, find this loaded module in its own root?

    A rank process serves many cells, and two folders may each have a ``models.py``.
    """
    file = Path(getattr(sys.modules[module], "__file__", None) or ".")
    depth = module.count(".") + (file.stem == "__init__")
    # Built in, or a namespace package.
    if len(file.parents) <= depth:
        return False
    home = file.parents[depth]
    return home != root and str(home) in _ROOTS


def one_line(error: BaseException) -> str:
    """An exception in one line: type, text, and the innermost place in a file of the user's."""
    name = type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{name}: {error.msg} ({Path(error.filename or '?').name}:{error.lineno})"
    text = " ".join(str(error).split())
    if text:
        name = f"{name}: {text}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_import_machinery(frame.filename)]
    # A factory of the user's often fails deep in a library: what helps is the line that called it.
    libraries = _library_folders()
    own = [frame for frame in frames if libraries.isdisjoint(Path(frame.filename).parents)]
    # Where no frame is the user's, the innermost of a library says more than none.
    shown = own or frames
    if not shown:
        return name
    return f"{name} ({Path(shown[-1].filename).name}:{shown[-1].lineno})"


def _is_import_machinery(filename: str) -> bool:
    file = Path(filename)
    return filename.startswith("<") or file == Path(__file__) or _IMPORTLIB in file.parents


def _library_folders() -> set[Path]:
    """Folders in which no file of the user's is."""
    # This package in a checkout, and a torch that was built from one, are in none of the folders of what is installed.
    folders = _INSTALLED | {Path(__file__).parent}
    torch = sys.modules.get("torch")
    if torch is not None:
        folders |= {Path(torch.__file__ or "").parent}
    return folders


_IMPORTLIB = Path(importlib.__file__).parent
_INSTALLED = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}


def kind_of(value: Any) -> str:
    """What a value is, in a sentence about it."""
    if value is None:
        return "None"
    return f"an object of type {type(value).__name__}"
