"""Which names a module binds when it is imported, as far as its source tells."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Names", "names_of"]

# Code that can bind names which its source does not show.
_DYNAMIC: Final = frozenset({"*", "__getattr__", "exec", "globals", "setattr", "vars"})
_LITERALS: Final[dict[type, str]] = {
    ast.Dict: "a dict", ast.List: "a list", ast.Tuple: "a tuple", ast.Set: "a set", ast.JoinedStr: "a text",
    str: "a text", bytes: "bytes", bool: "a boolean", int: "a number", float: "a number", type(None): "None",
}


@dataclass
class Names:
    """What the top level of a module binds."""

    bound: set[str] = field(default_factory=set)
    literals: dict[str, str] = field(default_factory=dict)
    """Names that are only ever a plain value, and what it is: ``a dict``."""
    parameters: dict[str, frozenset[str]] = field(default_factory=dict)
    """Functions and classes that take these keywords and no others."""
    open: bool = False
    """Can there be more names than the source shows?"""


def names_of(module: ast.Module) -> Names:
    """Walk everything that runs at import, and ``global`` statements anywhere.

    Names that comprehensions bind count too: better to believe a name that is not there than to refuse one
    that is.
    """
    found = Names()
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
