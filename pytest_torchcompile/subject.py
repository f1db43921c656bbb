"""The subject of a cell: the model under test, its batches and loss, made from a matrix entry's references.

Runs in rank processes. What is wrong with the matrix or the user's factories is a
:class:`~pytest_torchcompile.errors.UsageError` that starts with the place in the matrix; what this machine
cannot do is :class:`~pytest_torchcompile.errors.Unavailable`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import random
import re
import subprocess
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_torchcompile import dims
from pytest_torchcompile.backends import BACKENDS
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import Unavailable, UsageError, nearest
from pytest_torchcompile.oracle.ownership import says_fork

if TYPE_CHECKING:
    from pytest_torchcompile.matrix import ModelEntry

__all__ = ["batch", "batches", "build", "compiler", "import_all", "loss", "resolve", "settings"]


def build(entry: ModelEntry, cell: Cell, root: Path, seed: int) -> torch.nn.Module:
    """Make the model of a cell: parameters drawn from ``seed``, on the cell's device and in its dtype.

    The factory is called with the cell's own (user) axes as keywords; one that has a parameter ``device`` is
    told the cell's device too. Only floating parameters and buffers change their dtype. Raises
    :class:`UsageError` if the factory cannot be called so, raises, or returns something else than a module,
    and :class:`Unavailable` if this machine lacks the device or the dtype.
    """
    device, dtype = _placement(cell, entry.where)
    factory = resolve(entry.factory, root, entry.where)
    axes = dict(cell.user)
    if "device" in _named(factory):
        axes["device"] = cell.device
    _check_keywords(factory, axes, f"{entry.where}: factory {entry.factory!r}", "axis", "axes")
    _seed(seed)
    model = _call(factory, axes, f"{entry.where}: factory {entry.factory!r}")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{entry.where}: factory {entry.factory!r} returned {_kind(model)}; "
                         "expected a torch.nn.Module (wrap a function in one)")
    return model.to(device=device, dtype=dtype).train(cell.phase == "training")


def batches(entry: ModelEntry, cell: Cell, root: Path, seed: int) -> list[tuple[dict[str, int], Batch]]:
    """Make the batches of a cell, each with its sizes: one per binding of the entry's dims.

    The inputs function is called with the sizes as keywords, and with those user axes that it names.
    Raises as :func:`build`.
    """
    return [(sizes, batch(entry, cell, root, seed + index, sizes))
            for index, sizes in enumerate(dims.bindings(entry.dims))]


def batch(entry: ModelEntry, cell: Cell, root: Path, seed: int, sizes: Mapping[str, int]) -> Batch:
    """Make one batch of the given sizes; as :func:`batches`."""
    device, dtype = _placement(cell, entry.where)
    inputs = resolve(entry.inputs, root, entry.where)
    keywords = {name: value for name, value in cell.user if name in _named(inputs)} | dict(sizes)
    _check_keywords(inputs, keywords, f"{entry.where}: inputs {entry.inputs!r}", "dim", "dims")
    _seed(seed)
    value = _call(inputs, keywords, f"{entry.where}: inputs {entry.inputs!r}")
    return Batch.of(value).to(device=device, dtype=dtype)


def loss(entry: ModelEntry, root: Path) -> Callable[..., Any] | None:
    """Return the entry's loss function, or None if it has none."""
    if not entry.loss:
        return None
    found: Callable[..., Any] = resolve(entry.loss, root, entry.where)
    return found


def settings(cell: Cell, root: Path, where: str) -> dict[str, Any]:
    """Return the keyword arguments of ``torch.compile`` that a cell means.

    A backend ``module:attribute`` is looked up. ``mode`` is handed only to a backend that takes modes (torch
    itself ignores it elsewhere). Raises :class:`UsageError` for a backend that cannot be looked up and
    :class:`Unavailable` if it needs a C++ compiler and there is none.
    """
    found: dict[str, Any] = {"backend": cell.backend, "dynamic": cell.torch_dynamic}
    if ":" in cell.backend:
        found["backend"] = resolve(cell.backend, root, where)
    elif (record := BACKENDS.get(cell.backend)) is not None and record.modes and cell.mode != "default":
        found["mode"] = cell.mode
    if cell.backend == "inductor" and torch.device(cell.device).type == "cpu" and compiler() is None:
        raise Unavailable("no C++ compiler found; install g++ or clang")
    return found


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
        raise UsageError(f"{where}: {reference!r} is {_kind(found)}; expected something callable")
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
        raise UsageError(f"{where}: cannot import {name!r}: {_told(error)}") from error


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


def _named(function: Callable[..., Any]) -> set[str]:
    """Names of the parameters that a keyword can reach; none if the signature is unknown or says ``**``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _check_keywords(function: Callable[..., Any], given: dict[str, Any], what: str, one: str,
                    many: str) -> None:
    """Raise :class:`UsageError` if the keywords do not fit the function's parameters."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # written in C: the call itself will tell
    parameters = signature.parameters.values()
    takes = ", ".join(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    takes = f"it takes {takes}" if takes else "it takes no parameters"
    try:
        signature.bind(**given)
    except TypeError as error:
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            for name in given.keys() - _named(function):
                raise UsageError(f"{what} has no parameter for the {one} {name!r}; {takes}") from None
        raise UsageError(f"{what} cannot be called with the {many} {', '.join(given) or '(none)'}: "
                         f"{error}; {takes}") from None


def _call(function: Callable[..., Any], keywords: dict[str, Any], what: str) -> Any:
    try:
        return function(**keywords)
    except (Unavailable, UsageError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        if says_fork(error):
            raise
        raise UsageError(f"{what} raised {_told(error)}") from error


def _told(error: BaseException) -> str:
    """An exception in one line: type, text, and the innermost place in a file of the user's."""
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename or '?').name}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if not f.filename.startswith("<") and Path(f.filename) != Path(__file__)
              and _IMPORTLIB not in Path(f.filename).parents]
    frames = [f for f in frames if _INSTALLED.isdisjoint(Path(f.filename).parents)] or frames
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


_IMPORTLIB = Path(importlib.__file__).parent
_INSTALLED = {Path(torch.__file__).parent,
              *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))}
"""Where no file of the user's is."""


def _kind(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:  # only a factory that has imported it can draw from it
        sys.modules["numpy"].random.seed(seed % 2**32)


def _placement(cell: Cell, where: str) -> tuple[torch.device, torch.dtype]:
    """The cell's device and dtype; Unavailable where a small matrix product of that dtype fails there."""
    dtype: Any = getattr(torch, cell.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{where}: torch has no dtype {cell.dtype!r}")
    try:
        device = torch.device(cell.device)
    except RuntimeError as error:
        raise UsageError(f"{where}: no device {cell.device!r}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available():
            raise Unavailable(f"device {cell.device!r} is not here: torch.cuda.is_available() is false")
        if (device.index or 0) >= count:
            raise Unavailable(f"device {cell.device!r} is not here: this machine has {count} of them")
        if cell.dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise Unavailable(f"device {cell.device!r} does not compute in bfloat16")
    if (missing := _missing(str(device), dtype)) is not None:
        raise Unavailable(f"device {cell.device!r} with dtype {cell.dtype} does not work here: {missing}")
    return device, dtype


@functools.cache
def _missing(device: str, dtype: torch.dtype) -> str | None:
    """Why a small matrix product does not run, or None if it does."""
    try:
        ones = torch.ones(2, 2, device=device, dtype=dtype)
        torch.mm(ones, ones)
    except Exception as error:  # each device has its own way to say no
        return _told(error)
    return None


@functools.cache
def compiler() -> str | None:
    """Return the C++ compiler that Inductor will call, or None: ``$CXX``, else g++ (clang++ on macOS).

    As torch 2.8 to 2.15 (``_inductor/cpp_builder.py: cpp_compiler_search``): the whole of ``$CXX`` is the
    name of one program, and it counts if ``--version`` succeeds. Warns if the name does not tell what it is:
    Inductor then writes its precompiled header under a name that the compiler does not look for, and each
    kernel takes three times as long.
    """
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    try:
        subprocess.run([name, "--version"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    if not re.search(r"clang|gcc|g\+\+|gnu-c\+\+", name):
        warnings.warn(
            f"CXX={name}: torch knows a compiler by its name, and this one has no g++, gcc or clang in it: "
            "Inductor's precompiled header is silently off and each C++ kernel takes about 3 times as long "
            "to compile; name the real compiler", RuntimeWarning, stacklevel=2)
    return name
