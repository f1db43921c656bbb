"""Syntax: what a call in the project's code means, where its name alone does not tell."""

from __future__ import annotations

import ast
from collections import Counter
from typing import Final

__all__ = ["WAYS_THROUGH_LINKS", "names_of_kernel_language", "way_through_links"]

_KERNEL_LANGUAGE: Final = "triton.language"
"""The module whose ``load`` reads memory, and no file."""
_BINDS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)
WAYS_THROUGH_LINKS: Final = frozenset({"realpath()", "resolve()"})
"""What :func:`way_through_links` returns."""


def way_through_links(node: ast.AST) -> str:
    """How a call asks where a path really is, which a link that is set anew changes; empty for any other node.

    No file is opened by it: what is opened then has the name that the link had led to. Where the module's own file is
    does not count, for a rank process looks for the module anew.
    """
    if not isinstance(node, ast.Call):
        return ""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    # A `resolve` that is handed something is none of a path.
    if called != "realpath" and (called != "resolve" or node.args):
        return ""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return "" if "__file__" in names else f"{called}()"


def names_of_kernel_language(tree: ast.Module) -> frozenset[str]:
    """Names that a module binds to Triton's language at its top, and to nothing else anywhere."""
    imported: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            # Without `as` only the name `triton` is bound.
            imported.update(alias.asname for alias in node.names if alias.name == _KERNEL_LANGUAGE and alias.asname)
    bound: Counter[str] = Counter()
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
            bound[inner.id] += 1
        elif isinstance(inner, ast.arg):
            bound[inner.arg] += 1
        elif isinstance(inner, ast.alias):
            bound[inner.asname or inner.name] += 1
        elif isinstance(inner, _BINDS):
            bound[inner.name or ""] += 1
        elif isinstance(inner, (ast.Global, ast.Nonlocal)):
            bound.update(inner.names)
    return frozenset(name for name in imported if bound[name] == 1)
