"""Dims: the named sizes that a model's inputs are made for, and the batches that one cell runs."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import Final

from pytest_torchcompile.errors import UsageError, nearest

__all__ = ["Dim", "Dims", "batch_sizes", "complete_sizes", "dim_mistakes", "evaluate", "first_sizes", "names_in",
           "sample_of_range"]


@dataclass(frozen=True, slots=True)
class Dim:
    """One named size: a number, an expression of other dims, or free within bounds.

    A free dim has ``buckets`` (sizes that inputs are padded to), ``choices`` (sizes that occur), or only
    bounds.
    """

    size: int | None = None
    expression: str | None = None
    buckets: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()
    min: int = 1
    max: int | None = None
    multiple_of: int = 1

    @property
    def listed(self) -> tuple[int, ...]:
        """The sizes that the dim steps through; empty if only its bounds are known."""
        return self.buckets or self.choices

    def allows(self, size: int) -> bool:
        """Is the size within the bounds, and a multiple of ``multiple_of``?"""
        if size < self.min or size % self.multiple_of:
            return False
        return self.max is None or size <= self.max

    @property
    def sizes(self) -> range:
        """Every size within the bounds of a dim that has a ``max``."""
        return range(_next_multiple(self.min, self.multiple_of), (self.max or 0) + 1, self.multiple_of)


    @property
    def is_range(self) -> bool:
        """Are only its bounds known, and do they leave more than one size?"""
        return self.size is None and self.expression is None and not self.listed and len(self.sizes) > 1


def sample_of_range(dim: Dim, middle: int) -> list[int]:
    """The middle, least and greatest size of a dim that is a range, each once."""
    sizes = dim.sizes
    # 0 and 1 are compiled apart, and say little of others.
    least = next((size for size in sizes if size > 1), sizes[0])
    return list(dict.fromkeys((middle, least, sizes[-1])))


Dims = Mapping[str, Dim]


def first_sizes(dims: Dims) -> dict[str, int]:
    """Return the one batch that serves where a single one is needed: the first of :func:`batch_sizes`."""
    return batch_sizes(dims)[0]


def batch_sizes(dims: Dims) -> list[dict[str, int]]:
    """Return the batches that one cell runs, each a size per dim, in the order of the dims.

    Dims with buckets or choices step through them together: the k-th batch takes the k-th size of each, and
    shorter lists begin again. A dim with bounds only has one size in all batches: near the middle, equal to
    no other dim's (torch gives equal sizes one symbol: duck shapes) and neither 0 nor 1 (torch never makes
    those dynamic), where the bounds leave room for that.
    Raises :class:`UsageError` for what :func:`dim_mistakes` finds.
    """
    for name, text in dim_mistakes(dims):
        raise UsageError(f"dim {name!r}: {text}")
    rows = _listed_rows(dims)
    order = _computed_dims(dims)
    _compute_sizes(dims, order, rows)
    for name, dim in dims.items():
        if name not in rows[0]:
            rows = _with_size(dims, order, rows, name, dim.sizes)
    return [_in_order(row, dims) for row in rows]


def complete_sizes(dims: Dims, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return one batch: the sizes given for the free dims, the numbers, and what the expressions make of them.

    Raises :class:`UsageError` where an expression has no value for these sizes.
    """
    row = {name: dim.size for name, dim in dims.items() if dim.size is not None} | dict(sizes)
    _compute_sizes(dims, _computed_dims(dims), [row])
    return _in_order(row, dims)


def _in_order(row: Mapping[str, int], dims: Dims) -> dict[str, int]:
    return {name: row[name] for name in dims}


def dim_mistakes(dims: Dims) -> list[tuple[str, str]]:
    """Return (dim, what is wrong with it) for every dim that has no size, or none within its own bounds."""
    mistakes = []
    for name, dim in dims.items():
        mistakes += [(name, text) for text in _mistakes_of(dim, dims)]
    # Only expressions of known dims can be followed from one to the next.
    cycle = None if mistakes else _find_cycle(dims)
    if cycle:
        mistakes.append((cycle[0], f"is computed from itself: {' -> '.join(cycle)}"))
    return mistakes


def _mistakes_of(dim: Dim, dims: Dims) -> Iterator[str]:
    if dim.size is not None:
        return
    if dim.expression is not None:
        try:
            used = names_in(dim.expression)
        except UsageError as error:
            yield str(error)
            return
        for other in sorted(used - dims.keys()):
            yield f"{dim.expression!r} uses {other!r}, which is not a dim; {nearest(other, dims)}"
    elif dim.buckets and dim.choices:
        yield "has both buckets and choices; expected one of them"
    elif dim.listed:
        for size in dim.listed:
            if not dim.allows(size):
                yield f"{size} is outside the dim's own min, max or multiple_of"
    elif dim.max is None:
        yield "has no size; expected buckets, choices or max"
    elif not dim.sizes:
        yield f"no multiple of {dim.multiple_of} lies between min {dim.min} and max {dim.max}"


def _find_cycle(dims: Dims) -> list[str] | None:
    """Return the names along a cycle of expressions, each computed from the next, if there is one."""
    try:
        _computed_dims(dims)
    except CycleError as error:
        # From the dim that is used to the dim that uses it.
        cycle: list[str] = error.args[1]
        return cycle[::-1]
    return None


def _computed_dims(dims: Dims) -> list[str]:
    """Return the computed dims, each after those that it uses."""
    uses: dict[str, frozenset[str]] = {}
    for name, dim in dims.items():
        uses[name] = frozenset()
        if dim.expression is not None:
            uses[name] = names_in(dim.expression)
    return [name for name in TopologicalSorter(uses).static_order() if dims[name].expression is not None]


def _listed_rows(dims: Dims) -> list[dict[str, int]]:
    """Return the batches as far as numbers, buckets and choices say."""
    columns: dict[str, tuple[int, ...]] = {}
    for name, dim in dims.items():
        sizes = dim.listed
        if dim.size is not None:
            sizes = (dim.size,)
        if sizes:
            columns[name] = sizes
    count = max(map(len, columns.values()), default=1)
    rows = []
    for index in range(count):
        # Shorter lists begin again.
        rows.append({name: sizes[index % len(sizes)] for name, sizes in columns.items()})
    return rows


def _compute_sizes(dims: Dims, order: Iterable[str], rows: list[dict[str, int]]) -> None:
    """Add every expression to the batches that have all it needs."""
    for row in rows:
        for name in order:
            text = dims[name].expression
            if text is not None and name not in row and names_in(text) <= row.keys():
                row[name] = evaluate(text, row)


def _with_size(dims: Dims, order: list[str], rows: list[dict[str, int]], name: str,
               sizes: range) -> list[dict[str, int]]:
    """Return the batches with a size for the free dim ``name``, the best by the rule of :func:`batch_sizes`."""
    taken: set[int] = set()
    for row in rows:
        taken.update(row.values())
    # Some size near the middle fits nearly always; a dim of a million sizes is not searched to its ends.
    for size in islice(_outward(sizes), 1000):
        tried = [row | {name: size} for row in rows]
        try:
            _compute_sizes(dims, order, tried)
        except UsageError:
            # Some expression has no value there; if it has none anywhere, the last line says so.
            continue
        if size > 1 and all(_has_new_sizes(row, rows[0], taken) for row in tried):
            return tried
    # None is unlike all others. Torch never makes 0 and 1 dynamic, so they are the last choice.
    size = next((size for size in _outward(sizes) if size > 1), sizes[-1])
    tried = [row | {name: size} for row in rows]
    _compute_sizes(dims, order, tried)
    return tried


def _has_new_sizes(row: Mapping[str, int], before: Mapping[str, int], taken: set[int]) -> bool:
    """Are the sizes of the dims that ``before`` lacks different from each other, and from all that are taken?"""
    new = [size for name, size in row.items() if name not in before]
    return len(set(new)) == len(new) and taken.isdisjoint(new)


def _outward(sizes: range) -> Iterator[int]:
    """Yield the sizes from the middle outwards: the middle, one above, one below, two above ..."""
    middle = (len(sizes) - 1) // 2
    for step in range(len(sizes)):
        distance = (step + 1) // 2
        if step % 2:
            yield sizes[middle + distance]
        else:
            yield sizes[middle - distance]


def _next_multiple(size: int, step: int) -> int:
    """Return the least multiple of ``step`` that is at least ``size``."""
    return -(-size // step) * step


# Expressions: integer arithmetic, and nothing else of Python.

_OPERATORS: Final[dict[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CALLS: Final[dict[str, Callable[..., int]]] = {"min": min, "max": max}
_ALLOWED: Final = "integers, other dims, + - * // %, min(), max() and parentheses"
_LONGEST: Final = 200
"""Characters of an expression: far beyond any real size, far below what could take long."""


def names_in(text: str) -> frozenset[str]:
    """Return the dims that the expression uses; raises :class:`UsageError` if it is none."""
    nodes = list(ast.walk(_parse_expression(text)))
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name) and node not in called)


def evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """Return the value of the expression; raises :class:`UsageError` if it is no size (negative, say)."""
    try:
        value = _value_of(_parse_expression(text), sizes)
    except ZeroDivisionError:
        value = -1
    if value < 0:
        given = ", ".join(f"{name} = {sizes[name]}" for name in sorted(names_in(text)))
        raise UsageError(f"{text!r} gives no size" + (f" for {given}" if given else ""))
    return value


@lru_cache(maxsize=256)
def _parse_expression(text: str) -> ast.expr:
    """Parse and check every node against the whitelist, so that evaluation meets nothing unknown."""
    if len(text) > _LONGEST:
        raise UsageError(f"an expression of {len(text)} characters; at most {_LONGEST} are read")
    try:
        with warnings.catch_warnings():
            # Python warns of odd literals; they are refused below.
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise UsageError(f"{text!r} is not an expression of {_ALLOWED}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            raise UsageError(f"{text!r} divides with '/', which gives no whole number; use '//'")
        if not _is_allowed(node):
            raise UsageError(f"{text!r} uses {_source_text(node)}; allowed are {_ALLOWED}")
    return tree


def _is_allowed(node: ast.AST) -> bool:
    # Exactly int: a bool is an int too.
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.Call):
        known = isinstance(node.func, ast.Name) and node.func.id in _CALLS
        return known and bool(node.args) and not node.keywords
    return isinstance(node, (ast.BinOp, ast.UnaryOp, ast.USub, ast.UAdd, ast.Name, ast.Load, *_OPERATORS))


def _source_text(node: ast.AST) -> str:
    if isinstance(node, ast.expr):
        return repr(ast.unparse(node))
    return f"the operator {type(node).__name__}"


def _value_of(node: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant):
        # No other constant than an int is allowed.
        return int(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp):
        value = _value_of(node.operand, sizes)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value_of(node.left, sizes), _value_of(node.right, sizes))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        arguments = [_value_of(argument, sizes) for argument in node.args]
        return _CALLS[node.func.id](arguments)
    raise UsageError(f"{_source_text(node)} is not an expression of {_ALLOWED}")
