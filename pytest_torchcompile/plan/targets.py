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
_OWN_FOLDER: Final = Path(__file__).parents[1]


@dataclass(frozen=True)
class _Place:
    """Where a module is: its source, and the folders of its submodules. Neither: it cannot be looked into."""

    source: Path | None = None
    folders: tuple[Path, ...] = ()


_UNREADABLE: Final = _Place()
"""A module that is there, and whose source cannot be read."""


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
        names = self._names_in(module)
        if isinstance(names, str):
            return f"{target!r} cannot be imported: {names}"
        if names is None:
            return None
        # Of `Model.build` only `Model` is looked up: what a class has is not known without importing it.
        name = attribute.partition(".")[0]
        if name in names.bound:
            literal = names.literals.get(attribute)
            return f"{target!r} is not callable, it is {literal}" if literal else None
        if names.open:
            return None
        public = [bound for bound in names.bound if not bound.startswith("_")]
        return f"{target!r} cannot be imported: {module} has no attribute {name!r}; {nearest(name, public)}"

    def parameters(self, target: str) -> frozenset[str] | None:
        """Return the keywords that the callable takes; None if the source does not tell, or it takes any."""
        module, _, attribute = target.partition(":")
        names = self._names_in(module)
        if isinstance(names, BoundNames):
            return names.parameters.get(attribute)
        return None

    def _names_in(self, module: str) -> BoundNames | str | None:
        """What a module binds, None if its source can't be read, or what is wrong with the module's name."""
        if module not in self._modules:
            source = self._find_source(module)
            self._modules[module] = _parse_source(source) if isinstance(source, Path) else source
        return self._modules[module]

    def _find_source(self, module: str) -> Path | str | None:
        """Return the module's source, None if there is none to read, or what is wrong with the name."""
        place = _Place(folders=(self.root, *map(Path, sys.path)))
        parts = module.split(".")
        for depth, part in enumerate(parts):
            inner = _find_in_folders(part, place.folders)
            # Only a top-level name may be built in, zipped or editable.
            if inner is None and depth == 0:
                inner = _ask_finders(part)
            if inner is None:
                return self._missing_module(parts, depth, place)
            if inner == _UNREADABLE:
                return None
            place = inner
        return place.source

    def _missing_module(self, parts: list[str], depth: int, place: _Place) -> str | None:
        """What is wrong with the name of a module that is not in its package; None if it may be there all the same."""
        above = ".".join(parts[:depth])
        if place.source and _makes_modules(place.source):
            return None
        if place.source and not place.folders:
            return f"{above} is a module, not a package"
        if depth == 0:
            # Who has read of the zoo in the docs writes it without the package.
            if _find_in_folders(parts[0], (_OWN_FOLDER,)):
                return f"no module {parts[0]!r}; this package's own is 'pytest_torchcompile.{parts[0]}'"
            known = _modules_in((self.root,))
            return f"no module {parts[depth]!r}; {nearest(parts[depth], known)}"
        known = _modules_in(place.folders)
        return f"no module {parts[depth]!r} in {above}; {nearest(parts[depth], known)}"


def _find_in_folders(name: str, folders: Iterable[Path]) -> _Place | None:
    """Look one name up as Python's own path finder does."""
    # Beyond what file systems take as a name, asking raises.
    if len(name.encode()) >= 240:
        return None
    namespace = []
    for folder in folders:
        init = folder / name / "__init__.py"
        if init.is_file():
            return _Place(init, (init.parent,))
        if any((folder / f"{name}{suffix}").is_file() for suffix in _BINARY):
            return _UNREADABLE
        file = folder / f"{name}.py"
        if file.is_file():
            return _Place(file)
        if (folder / name).is_dir():
            namespace.append(folder / name)
    if namespace:
        return _Place(None, tuple(namespace))
    return None


def _ask_finders(name: str) -> _Place | None:
    """Ask the installed finders for a top-level name (built in, zipped, editable); that imports nothing."""
    try:
        spec = importlib.util.find_spec(name)
    # Finders are others' code, and those of editable installs raise all of these.
    except (ImportError, ValueError, AttributeError):
        return _UNREADABLE
    if spec is None:
        return None
    # A package, or a namespace of several folders.
    folders = tuple(map(Path, spec.submodule_search_locations or ()))
    if spec.origin and spec.origin.endswith(".py"):
        source = Path(spec.origin)
        return _Place(source, folders) if source.is_file() else _UNREADABLE
    if folders and all(folder.is_dir() for folder in folders):
        return _Place(None, folders)
    return _UNREADABLE


def _makes_modules(source: Path) -> bool:
    """Does the module put others below itself, as ``os`` does with ``os.path``?"""
    try:
        text = source.read_bytes()
    except OSError:
        return True
    # Rough on purpose: who takes a module for one of these only says less about its attributes.
    return b"sys.modules" in text or b"__path__" in text


def _modules_in(folders: Iterable[Path]) -> set[str]:
    """The names of the modules and packages in folders."""
    names = set()
    for folder in filter(Path.is_dir, folders):
        for child in folder.iterdir():
            if child.suffix == ".py" and child.stem.isidentifier() and child.stem != "__init__":
                names.add(child.stem)
            elif (child / "__init__.py").is_file():
                names.add(child.name)
    return names


def _parse_source(path: Path) -> BoundNames | str | None:
    try:
        # As Python reads source: an encoding line counts.
        with tokenize.open(path) as file:
            source = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # To parse warns of odd escapes in the user's file, which is not what was asked about.
            return names_of(ast.parse(source))
    except OSError:
        return None
    except SyntaxError as error:
        return f"{path}:{error.lineno or 1}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{path}: {error}"


# Which names a module binds when it is imported, as far as its source tells.

_DYNAMIC: Final = frozenset({"*", "__getattr__", "exec", "globals", "setattr", "vars"})
"""Code that can bind names which its source does not show."""
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
    names = BoundNames()
    counts: Counter[str] = Counter()
    used = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Global):
            counts.update(node.names)
        elif isinstance(node, ast.Name):
            used.add(node.id)
    for node in _nodes_at_import(module):
        counts.update(_names_bound_by(node))
        _note_kind(node, names)
    for name, count in counts.items():
        # Which of them it is depends on what runs.
        if count > 1:
            names.literals.pop(name, None)
            names.parameters.pop(name, None)
    names.bound = set(counts)
    names.open = not _DYNAMIC.isdisjoint(names.bound | used)
    return names


def _note_kind(node: ast.AST, names: BoundNames) -> None:
    """Note a name that is bound to a plain value, and the keywords of a function or class."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        literal = _literal_kind(node.value)
        if literal is not None:
            names.literals[node.targets[0].id] = literal
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        keywords = _keywords_of(node)
        if keywords is not None:
            names.parameters[node.name] = keywords


def _nodes_at_import(module: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes outside functions and classes; those inside if, try, with and loops too."""
    waiting: list[ast.AST] = [module]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def _names_bound_by(node: ast.AST) -> list[str]:
    """Return the names that this node itself binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Import):
        # `import a.b` binds `a`.
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
        return [node.name]
    return []


def _literal_kind(value: ast.expr) -> str | None:
    if isinstance(value, ast.Constant):
        return _LITERALS.get(type(value.value))
    return _LITERALS.get(type(value))


def _keywords_of(node: ast.FunctionDef | ast.ClassDef) -> frozenset[str] | None:
    """Return the keywords that a call may give; None if the source does not tell, or for ``**kwargs``."""
    # A decorator may hand back something else than what it was given.
    if node.decorator_list:
        return None
    if isinstance(node, ast.ClassDef):
        return _keywords_of_class(node)
    if node.args.kwarg is not None:
        return None
    return frozenset(argument.arg for argument in node.args.args + node.args.kwonlyargs)


def _keywords_of_class(node: ast.ClassDef) -> frozenset[str] | None:
    methods = {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}
    init = methods.get("__init__")
    # A metaclass, or __new__, may take other keywords than __init__ does.
    if init is None or "__new__" in methods or node.keywords:
        return None
    keywords = _keywords_of(init)
    if keywords is None:
        return None
    own = [argument.arg for argument in init.args.posonlyargs + init.args.args]
    return keywords - set(own[:1])
