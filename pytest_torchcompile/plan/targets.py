"""Targets: is there such a thing as ``module:attribute``? Answered from source files, without importing any.

A matrix is read where its models need not be importable yet (no torch, no GPU), and in a process that must
not run users' code. What cannot be seen in the source (star imports, C extensions, ``__getattr__``) is
believed; the rank process finds out.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import re
import sys
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pytest_torchcompile.errors import nearest

__all__ = ["Targets"]

_SYNTAX: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_BINARY: Final = tuple(suffix for suffix in importlib.machinery.all_suffixes() if suffix != ".py")


@dataclass(frozen=True)
class _Place:
    """Where a module is: its source, and the folders of its submodules. Neither: it cannot be looked into."""

    source: Path | None = None
    folders: tuple[Path, ...] = ()


@dataclass
class Targets:
    """Looks targets up below ``root``, then along ``sys.path``; remembers what it found."""

    root: Path
    _modules: dict[str, BoundNames | str | None] = field(default_factory=dict)

    def mistake(self, target: str) -> str | None:
        """Return what is wrong with ``module:attribute``, or None if nothing can be seen to be."""
        if not _SYNTAX.fullmatch(target):
            return f"{target!r} names no code; expected module:attribute, for example my_models.gpt:build"
        module, _, attribute = target.partition(":")
        found = self._module(module)
        if isinstance(found, str):
            return f"{target!r} cannot be imported: {found}"
        if found is None:
            return None
        name = attribute.partition(".")[0]
        if name in found.bound:
            literal = found.literals.get(attribute)
            return f"{target!r} is not callable, it is {literal}" if literal else None
        if found.open:
            return None
        public = [name for name in found.bound if not name.startswith("_")]
        return f"{target!r} cannot be imported: {module} has no attribute {name!r}; {nearest(name, public)}"

    def parameters(self, target: str) -> frozenset[str] | None:
        """Return the keywords that the callable takes; None if the source does not tell, or it takes any."""
        module, _, attribute = target.partition(":")
        found = self._module(module)
        return found.parameters.get(attribute) if isinstance(found, BoundNames) else None

    def _module(self, name: str) -> BoundNames | str | None:
        if name not in self._modules:
            found = self._find(name)
            self._modules[name] = _parse(found) if isinstance(found, Path) else found
        return self._modules[name]

    def _find(self, module: str) -> Path | str | None:
        """Return the module's source, None if there is none to read, or what is wrong with the name."""
        place = _Place(folders=(self.root, *map(Path, sys.path)))
        parts = module.split(".")
        for depth, part in enumerate(parts):
            above = ".".join(parts[:depth])
            found = _in_folders(part, place.folders) or (None if depth else _by_finders(part))
            if found is None:
                if place.source and _makes_modules(place.source):
                    return None
                if place.source and not place.folders:
                    return f"{above} is a module, not a package"
                known = _modules_in(place.folders if depth else (self.root,))
                return f"no module {part!r}{f' in {above}' if above else ''}; {nearest(part, known)}"
            if found == _Place():
                return None
            place = found
        return place.source


def _in_folders(name: str, folders: Iterable[Path]) -> _Place | None:
    """Look one name up as Python's own path finder does."""
    namespace = []
    for folder in folders if len(name.encode()) < 240 else ():  # beyond what file systems take, asking raises
        if (init := folder / name / "__init__.py").is_file():
            return _Place(init, (init.parent,))
        if any((folder / f"{name}{suffix}").is_file() for suffix in _BINARY):
            return _Place()
        if (file := folder / f"{name}.py").is_file():
            return _Place(file)
        if (folder / name).is_dir():
            namespace.append(folder / name)
    return _Place(None, tuple(namespace)) if namespace else None


def _by_finders(name: str) -> _Place | None:
    """Ask the installed finders for a top-level name (built in, zipped, editable); that imports nothing."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return _Place()
    if spec is None:
        return None
    folders = tuple(Path(folder) for folder in spec.submodule_search_locations or ())
    source = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    readable = source.is_file() if source else bool(folders) and all(folder.is_dir() for folder in folders)
    return _Place(source, folders) if readable else _Place()


def _makes_modules(source: Path) -> bool:
    """Does the module put others below itself, as ``os`` does with ``os.path``?"""
    try:
        text = source.read_bytes()
    except OSError:
        return True
    return b"sys.modules" in text or b"__path__" in text


def _modules_in(folders: Iterable[Path]) -> set[str]:
    """The names of the modules and packages in folders."""
    names = set()
    for folder in folders:
        for child in folder.iterdir() if folder.is_dir() else ():
            if child.suffix == ".py" and child.stem.isidentifier() and child.stem != "__init__":
                names.add(child.stem)
            elif (child / "__init__.py").is_file():
                names.add(child.name)
    return names


def _parse(path: Path) -> BoundNames | str | None:
    try:
        with tokenize.open(path) as file:  # as Python reads source: an encoding line counts
            source = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return names_of(ast.parse(source))
    except OSError:
        return None
    except SyntaxError as error:
        return f"{path}:{error.lineno or 1}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{path}: {error}"


# Which names a module binds when it is imported, as far as its source tells.

# Code that can bind names which its source does not show.
_DYNAMIC: Final = frozenset({"*", "__getattr__", "exec", "globals", "setattr", "vars"})
_LITERALS: Final[dict[type, str]] = {
    ast.Dict: "a dict", ast.List: "a list", ast.Tuple: "a tuple", ast.Set: "a set", ast.JoinedStr: "a text",
    str: "a text", bytes: "bytes", bool: "a boolean", int: "a number", float: "a number", type(None): "None",
}


@dataclass
class BoundNames:
    """What the top level of a module binds."""

    bound: set[str] = field(default_factory=set)
    literals: dict[str, str] = field(default_factory=dict)
    """Names that are only ever a plain value, and what it is: ``a dict``."""
    parameters: dict[str, frozenset[str]] = field(default_factory=dict)
    """Functions and classes that take these keywords and no others."""
    open: bool = False
    """Can there be more names than the source shows?"""


def names_of(module: ast.Module) -> BoundNames:
    """Walk everything that runs at import, and ``global`` statements anywhere.

    Names that comprehensions bind count too: better to believe a name that is not there than to refuse one
    that is.
    """
    found = BoundNames()
    counts = Counter(name for node in ast.walk(module) if isinstance(node, ast.Global) for name in node.names)
    for node in _at_import(module):
        counts.update(_binds(node))
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            if literal := _literal(node.value):
                found.literals[node.targets[0].id] = literal
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (taken := _keywords(node)) is not None:
            found.parameters[node.name] = taken
    for name, count in counts.items():
        if count > 1:  # which of them it is depends on what runs
            found.literals.pop(name, None)
            found.parameters.pop(name, None)
    used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    found.bound = set(counts)
    found.open = not _DYNAMIC.isdisjoint(found.bound | used)
    return found


def _at_import(module: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes outside functions and classes; those inside if, try, with and loops too."""
    waiting: list[ast.AST] = [module]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def _binds(node: ast.AST) -> list[str]:
    """Return the names that this node itself binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Import):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
        return [node.name]
    return []


def _literal(value: ast.expr) -> str | None:
    return _LITERALS.get(type(value.value) if isinstance(value, ast.Constant) else type(value))


def _keywords(node: ast.FunctionDef | ast.ClassDef) -> frozenset[str] | None:
    """Return the keywords that a call may give; None if the source does not tell, or for ``**kwargs``."""
    if node.decorator_list:
        return None
    if isinstance(node, ast.ClassDef):
        methods = {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}
        init = methods.get("__init__")
        if init is None or "__new__" in methods or node.keywords:
            return None
        taken = _keywords(init)
        own = init.args.posonlyargs + init.args.args
        return None if taken is None else taken - {own[0].arg if own else ""}
    if node.args.kwarg is not None:
        return None
    return frozenset(argument.arg for argument in node.args.args + node.args.kwonlyargs)
