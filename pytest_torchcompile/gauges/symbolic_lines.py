"""Symbolic lines: where a graph computes its sizes, and in which place it takes them, decides nothing. No torch.

Versions of torch put such lines and parameters elsewhere (2.15 does beside 2.13) though each computes the same of the
same. So a size is computed right before its first use here, and sizes are the last parameters. All other lines stay in
their order, which may matter: of what changes a tensor, of random numbers, of collectives.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

__all__ = ["settle_symbolic_lines"]

_READS_SIZES: Final = "torch.ops.aten.sym_"
"""``sym_size.int``, ``sym_stride.int`` and their like ask a tensor for numbers, and not for its values."""


def settle_symbolic_lines(graph: ast.FunctionDef, *, with_parameters: bool) -> None:
    """Give the symbolic lines of a graph's ``forward`` their place, and take out the lines that only free a value.

    ``with_parameters``: its parameters too. Those of a graph that another one calls stay where its caller wants them.
    """
    symbolic = {argument.arg for argument in graph.args.args if _is_symbolic(argument.annotation)}
    bound = {argument.arg for argument in graph.args.args}
    waiting: dict[str, ast.AnnAssign] = {}
    settled: list[ast.stmt] = []
    for line in graph.body:
        if _only_frees(line):
            continue
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and _is_symbolic(line.annotation):
            name, can_wait = line.target.id, _can_wait(line, bound, symbolic)
            symbolic.add(name)
            bound.add(name)
            if can_wait:
                waiting[name] = line
                continue
        bound.update(_names_bound(line))
        needed = list(_names_used(line))
        if isinstance(line, ast.Return) or _changes_in_place(line):
            needed += waiting
        for name in needed:
            _settle(name, waiting, settled)
        settled.append(line)
    graph.body = settled
    if with_parameters:
        # Stable: only their place may tell one tensor from another, and one size from another.
        graph.args.args.sort(key=lambda argument: _is_symbolic(argument.annotation))


def _settle(name: str, waiting: dict[str, ast.AnnAssign], settled: list[ast.stmt]) -> None:
    """Put the line of a size, and before it those of the sizes that it is computed of, if they still wait."""
    line = waiting.pop(name, None)
    if line is None:
        return
    for used in _names_used(line):
        _settle(used, waiting, settled)
    settled.append(line)


def _is_symbolic(annotation: ast.expr | None) -> bool:
    """Is it the annotation of a size? Those are texts: ``Sym(8*s77)``."""
    return isinstance(annotation, ast.Constant) and str(annotation.value).startswith("Sym(")


def _can_wait(line: ast.AnnAssign, bound: set[str], symbolic: set[str]) -> bool:
    """Is the size computed of sizes alone, or asked of a tensor? ``item()`` gives one too, and reads values."""
    if line.value is None:
        return False
    if isinstance(line.value, ast.Call) and ast.unparse(line.value.func).startswith(_READS_SIZES):
        return True
    return symbolic.issuperset(bound.intersection(_names_used(line)))


def _changes_in_place(line: ast.stmt) -> bool:
    """May it change sizes that a later line asks for? As ``x.resize_`` and ``torch.ops.aten.set_.source_Tensor`` do."""
    return any(isinstance(node, ast.Attribute) and node.attr.endswith("_") for node in ast.walk(line))


def _only_frees(line: ast.stmt) -> bool:
    """``x = y = None``, after the last use of both: that follows from the other lines."""
    return isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant) and line.value.value is None


def _names_used(line: ast.stmt) -> Iterator[str]:
    for node in ast.walk(line):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id


def _names_bound(line: ast.stmt) -> Iterator[str]:
    for node in ast.walk(line):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
