"""Sizes computed from other sizes, such as ``S + 1``: integer arithmetic, and nothing else of Python."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

from pytest_torchcompile.errors import UsageError

__all__ = ["evaluate", "names"]

_OPERATORS: Final[dict[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CALLS: Final[dict[str, Callable[..., int]]] = {"min": min, "max": max}
_ALLOWED: Final = "integers, other dims, + - * // %, min(), max() and parentheses"
_LONGEST: Final = 200  # characters: far beyond any real size, far below what could take long


def names(text: str) -> frozenset[str]:
    """Return the dims that the expression uses; raises :class:`UsageError` if it is none."""
    nodes = list(ast.walk(_parse(text)))
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name) and node not in called)


def evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """Return the value of the expression; raises :class:`UsageError` if it is no size (negative, say)."""
    try:
        value = _value(_parse(text), sizes)
    except ZeroDivisionError:
        value = -1
    if value < 0:
        given = ", ".join(f"{name} = {sizes[name]}" for name in sorted(names(text)))
        raise UsageError(f"{text!r} gives no size" + (f" for {given}" if given else ""))
    return value


@lru_cache(maxsize=256)
def _parse(text: str) -> ast.expr:
    """Parse and check every node against the whitelist, so that evaluation meets nothing unknown."""
    if len(text) > _LONGEST:
        raise UsageError(f"an expression of {len(text)} characters; at most {_LONGEST} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of odd literals; they are refused below
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise UsageError(f"{text!r} is not an expression of {_ALLOWED}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            raise UsageError(f"{text!r} divides with '/', which gives no whole number; use '//'")
        if not _allowed(node):
            raise UsageError(f"{text!r} uses {_source(node)}; allowed are {_ALLOWED}")
    return tree


def _allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.Call):
        known = isinstance(node.func, ast.Name) and node.func.id in _CALLS
        return known and bool(node.args) and not node.keywords
    return isinstance(node, (ast.BinOp, ast.UnaryOp, ast.USub, ast.UAdd, ast.Name, ast.Load, *_OPERATORS))


def _source(node: ast.AST) -> str:
    return repr(ast.unparse(node)) if isinstance(node, ast.expr) else f"the operator {type(node).__name__}"


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant):
        return int(node.value)  # type: ignore[arg-type]  # _allowed lets only ints through
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand, sizes)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        found = [_value(argument, sizes) for argument in node.args]
        return _CALLS[node.func.id](found)
    raise UsageError(f"{_source(node)} is not an expression of {_ALLOWED}")
