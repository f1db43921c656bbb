"""Definitions: which functions and classes of the project's modules a cell rests on, and the hash of just these.

A module is read as a syntax tree, without comments, docstrings and line numbers: an edit of these changes no code. Its
statements run when it is imported, whichever cell is run, so that they always count. A function or class counts only
if something that counts mentions its name, be it as a name, an attribute or in a text. A name says nothing about where
it is looked up, so more may count than is needed, and never less.

Code that looks names up at run time could reach any definition; then all of every module counts.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pytest_torchcompile.reuse.digests import digest_of
from pytest_torchcompile.reuse.syntax import names_of_kernel_language, way_through_links

__all__ = ["Definition", "ModuleText", "SourceUse", "numbered_definitions", "read_module", "use_of_sources"]

_DYNAMIC_FUNCTIONS: Final = frozenset({"globals", "vars", "locals", "eval", "exec", "dir"})
"""Python's own functions by which code comes to definitions that it does not name; as attributes they mean others."""
_DYNAMIC: Final = frozenset(
    {
        "__import__",
        "importlib",
        "import_module",
        "__subclasses__",
        "__init_subclass__",
        "__set_name__",
        "__dict__",
        "runpy",
        "pkgutil",
        "gc",
        "getmembers",
        "pickle",
        "load",
        "loads",
        "attrgetter",
        "methodcaller",
        "resolve_name",
        "instantiate",
        "builtins",
        "__builtins__",
    }
)
"""The same, also as attributes."""
_BY_NAME: Final = frozenset({"getattr", "setattr", "hasattr", "delattr"})
"""Functions that name an attribute by a text; where it is a constant, its words are known."""
READS_TEXT: Final = frozenset(
    {
        "__doc__",
        "getdoc",
        "getsource",
        "getsourcelines",
        "getsourcefile",
        "findsource",
        "linecache",
        "__code__",
        "co_firstlineno",
        "f_lineno",
        "currentframe",
        "_getframe",
        "lineno",
        "tb_lineno",
        "co_lines",
        "co_linetable",
        "co_consts",
        "extract_stack",
        "extract_tb",
        "format_exc",
        "format_stack",
        "getframeinfo",
        "getcomments",
        "tokenize",
        "script",
        "script_method",
        "script_if_tracing",
    }
)
"""Names by which code reads its own docstrings, comments or line numbers: then the bytes of its files count.

TorchScript reads types from comments."""
_HARMLESS_DECORATORS: Final = frozenset(
    {
        "property",
        "staticmethod",
        "classmethod",
        "setter",
        "getter",
        "overload",
        "abstractmethod",
        "cached_property",
        "override",
        "dataclass",
        "wraps",
        "cache",
        "lru_cache",
        "no_grad",
        "final",
        "contextmanager",
    }
)
"""Decorators that leave nothing behind but the function or class itself."""
_WORD: Final = re.compile(r"[^\W\d]\w*")
_AT_IMPORT: Final = "at import"
_Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_NAMED: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Definition:
    """A function or class of a module, or all statements that run when the module is imported."""

    digest: str
    identifiers: frozenset[str]
    """Every name and attribute in it."""
    texts: frozenset[str]
    """Every word in its texts."""
    is_dynamic: bool
    """Does it look names up at run time?"""


@dataclass(frozen=True)
class ModuleText:
    """A module, taken apart."""

    bytes_digest: str
    at_import: Definition
    named: Mapping[str, tuple[Definition, ...]]
    """Functions and classes by name; one name may be defined twice."""

    def definitions(self) -> Iterator[Definition]:
        """All of them."""
        yield self.at_import
        for same_name in self.named.values():
            yield from same_name


@dataclass(frozen=True)
class SourceUse:
    """What a cell rests on."""

    digest: str
    identifiers: frozenset[str] = field(default=frozenset())
    """Every name and attribute in the definitions that count."""
    texts: frozenset[str] = field(default=frozenset())
    """Every word of a text in any definition of the modules, and the names that the cell begins with."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Module to the hash of what counts of it."""


def use_of_sources(modules: Mapping[str, Path], names: Collection[str], everything: bool = False) -> SourceUse:
    """The definitions of some modules that count for a cell, which begins with some names.

    ``modules``: name to file. ``everything``: every definition counts. Raises OSError for a file that can't be read and
    SyntaxError or ValueError for one that is no Python.
    """
    read = {name: read_module(file) for name, file in sorted(modules.items())}
    if everything:
        counted = _all_definitions(read.values())
    else:
        counted = _counted_definitions(read.values(), names)
    identifiers: set[str] = set()
    # What the cell hands to its factory may be the name of a variable.
    texts: set[str] = set(names)
    for definition in counted:
        identifiers |= definition.identifiers
    for module in read.values():
        for definition in module.definitions():
            texts |= definition.texts
    parts = {name: _digest_of_module(module, counted, identifiers) for name, module in read.items()}
    return SourceUse(digest_of(parts), frozenset(identifiers), frozenset(texts), parts)


def _digest_of_module(module: ModuleText, counted: Collection[Definition], identifiers: Collection[str]) -> str:
    """The hash of what counts of a module: all bytes, where something that counts reads its own text."""
    digest = hashlib.sha256()
    if not READS_TEXT.isdisjoint(identifiers):
        digest.update(f"{module.bytes_digest}\n".encode())
    for definition in module.definitions():
        if definition in counted:
            digest.update(f"{definition.digest}\n".encode())
    return digest.hexdigest()


def _counted_definitions(modules: Collection[ModuleText], names: Collection[str]) -> set[Definition]:
    """The definitions that are reached from what runs at import and from some names; all, where one is dynamic."""
    index = _index_by_name(modules)
    # One of the project's own is not the harmless one of that name.
    if not _HARMLESS_DECORATORS.isdisjoint(index):
        return _all_definitions(modules)
    counted: set[Definition] = set()
    known = set(names)
    waiting = [module.at_import for module in modules]
    for name in known:
        waiting += index.get(name, ())
    while waiting:
        definition = waiting.pop()
        if definition in counted:
            continue
        if definition.is_dynamic:
            return _all_definitions(modules)
        counted.add(definition)
        for name in (definition.identifiers | definition.texts) - known:
            known.add(name)
            waiting += index.get(name, ())
    return counted


def _all_definitions(modules: Iterable[ModuleText]) -> set[Definition]:
    definitions: set[Definition] = set()
    for module in modules:
        definitions.update(module.definitions())
    return definitions


def _index_by_name(modules: Iterable[ModuleText]) -> dict[str, list[Definition]]:
    index: dict[str, list[Definition]] = {}
    for module in modules:
        for name, same_name in module.named.items():
            index.setdefault(name, []).extend(same_name)
    return index


def read_module(file: Path) -> ModuleText:
    """Take a module apart. Raises OSError for a file that can't be read, SyntaxError or ValueError for no Python."""
    return _take_apart(file.read_bytes())


# Cells of a matrix share their modules; without it each cell would parse all of them again.
@functools.lru_cache(maxsize=4096)
def _take_apart(data: bytes) -> ModuleText:
    tree = ast.parse(data)
    kernels = names_of_kernel_language(tree)
    at_import, apart = _split_module(tree)
    named: dict[str, list[Definition]] = {}
    for node, where in apart:
        named.setdefault(node.name, []).append(_describe([node], where, kernels))
    return ModuleText(
        hashlib.sha256(data).hexdigest(),
        _describe(at_import, _AT_IMPORT, kernels),
        {name: tuple(same) for name, same in named.items()},
    )


def numbered_definitions(tree: ast.Module) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Each definition of a module by a name that tells its code too, with its nodes; docstrings are dropped.

    Two of one name have the same nodes in the same order: only their places may be others.
    """
    at_import, apart = _split_module(tree)
    yield f"{_AT_IMPORT} {_describe(at_import, _AT_IMPORT).digest}", at_import
    met: Counter[str] = Counter()
    for node, where in apart:
        digest = _describe([node], where).digest
        # The same code may stand there twice.
        met[digest] += 1
        yield f"{node.name} {digest} {met[digest]}", [node]


def _split_module(tree: ast.Module) -> tuple[list[ast.stmt], list[tuple[_Named, str]]]:
    """What runs at import; and the other definitions, each with where it stands among that. Docstrings are dropped."""
    _drop_docstrings(tree)
    at_import: list[ast.stmt] = []
    apart: list[tuple[_Named, str]] = []
    for node in tree.body:
        if isinstance(node, _Named) and not _acts_at_import(node):
            # Where it stands among what runs at import matters: a default value is computed there.
            apart.append((node, f"{len(at_import)}"))
        else:
            at_import.append(node)
    return at_import, apart


def _drop_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            # A body must not be empty.
            node.body = node.body[1:] or [ast.Pass()]


def _acts_at_import(node: _Named) -> bool:
    """Could the definition do something when its module is imported, more than be there under its name?"""
    # Python itself calls a module's __getattr__.
    if node.name.startswith("__") or _has_strange_decorator(node):
        return True
    if not isinstance(node, ast.ClassDef):
        return _contains_call([node.args, node.returns])
    if _contains_call([*node.bases, *node.keywords]):
        return True
    for inner in node.body:
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if _has_strange_decorator(inner) or _contains_call([inner.args, inner.returns]):
                return True
        elif _contains_call([inner]):
            return True
    return False


def _has_strange_decorator(node: _Named) -> bool:
    for decorator in node.decorator_list:
        named = decorator.func if isinstance(decorator, ast.Call) else decorator
        last = named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", "")
        if last not in _HARMLESS_DECORATORS:
            return True
    return False


def _contains_call(nodes: Iterable[ast.AST | None]) -> bool:
    inside = itertools.chain.from_iterable(map(ast.walk, filter(None, nodes)))
    return any(isinstance(inner, ast.Call) for inner in inside)


def _describe(nodes: Collection[ast.stmt], where: str, kernels: Collection[str] = ()) -> Definition:
    digest = hashlib.sha256(where.encode())
    identifiers: set[str] = set()
    texts: set[str] = set()
    is_dynamic = False
    for node in nodes:
        digest.update(ast.dump(node).encode("utf-8", "surrogatepass"))
        # `__all__` names everything, and uses nothing.
        if isinstance(node, ast.Assign) and ast.dump(node.targets[0]) == ast.dump(ast.Name("__all__", ast.Store())):
            continue
        for inner in ast.walk(node):
            _collect_names(inner, identifiers, texts)
            is_dynamic = is_dynamic or _is_dynamic(inner, kernels)
        is_dynamic = is_dynamic or _names_by_computed_text(node)
    return Definition(digest.hexdigest(), frozenset(identifiers), frozenset(texts), is_dynamic)


def _collect_names(node: ast.AST, identifiers: set[str], texts: set[str]) -> None:
    if isinstance(node, ast.Name):
        identifiers.add(node.id)
    elif isinstance(node, ast.Attribute):
        identifiers.add(node.attr)
    elif isinstance(node, ast.alias):
        identifiers.update(node.name.split("."))
    elif isinstance(node, ast.ImportFrom):
        identifiers.update((node.module or "").split("."))
    elif way := way_through_links(node):
        identifiers.add(way)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        # A text may be looked up with getattr, or be an entry of a registry.
        texts.update(_WORD.findall(node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bytes):
        texts.update(_WORD.findall(node.value.decode("utf-8", "replace")))


def _is_dynamic(node: ast.AST, kernels: Collection[str]) -> bool:
    """Does the node look names up at run time? ``kernels``: of :func:`names_of_kernel_language`."""
    if isinstance(node, ast.Name):
        return node.id in _DYNAMIC or node.id in _DYNAMIC_FUNCTIONS
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if node.attr == "load" and owner in kernels:
            return False
        return node.attr in _DYNAMIC or (owner == "sys" and node.attr == "modules")
    if isinstance(node, ast.keyword):
        return node.arg == "metaclass"
    if isinstance(node, ast.FunctionDef):
        return node.name in _DYNAMIC
    if isinstance(node, ast.ImportFrom):
        # Under another name it would not be known again.
        return any(alias.name in _DYNAMIC or alias.name in (*_DYNAMIC_FUNCTIONS, "modules") for alias in node.names)
    return False


def _names_by_computed_text(node: ast.AST) -> bool:
    """Is an attribute named by a text that is no constant, or is a function that does so handed on?"""
    met = with_constant = 0
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in _BY_NAME:
            met += 1
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id in _BY_NAME:
            with_constant += len(inner.args) > 1 and isinstance(inner.args[1], ast.Constant)
    return met != with_constant
