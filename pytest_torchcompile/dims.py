"""Dims: the named sizes that a model's inputs are made for, and the batches that one cell runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import islice

from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.expressions import evaluate, names

__all__ = ["Dim", "Dims", "bindings", "completed", "mistakes", "single"]


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
        return self.min <= size and (self.max is None or size <= self.max) and size % self.multiple_of == 0

    @property
    def sizes(self) -> range:
        """Every size within the bounds of a dim that has a ``max``."""
        return range(_up(self.min, self.multiple_of), (self.max or 0) + 1, self.multiple_of)


Dims = Mapping[str, Dim]


def single(dims: Dims) -> dict[str, int]:
    """Return the one batch that serves where a single one is needed: the first of :func:`bindings`."""
    return bindings(dims)[0]


def bindings(dims: Dims) -> list[dict[str, int]]:
    """Return the batches that one cell runs, each a size per dim, in the order of the dims.

    Dims with buckets or choices step through them together: the k-th batch takes the k-th size of each, and
    shorter lists begin again. A dim with bounds only has one size in all batches: near the middle, equal to
    no other dim's (torch gives equal sizes one symbol: duck shapes) and neither 0 nor 1 (torch never makes
    those dynamic), where the bounds leave room for that.
    Raises :class:`UsageError` for what :func:`mistakes` finds.
    """
    for name, text in mistakes(dims):
        raise UsageError(f"dim {name!r}: {text}")
    rows = _listed(dims)
    order = _order(dims)
    _compute(dims, order, rows)
    for name, dim in dims.items():
        if name not in rows[0]:
            rows = _with_size(dims, order, rows, name, dim.sizes)
    return [{name: row[name] for name in dims} for row in rows]


def completed(dims: Dims, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return one batch: the sizes given for the free dims, the numbers, and what the expressions make of them.

    Raises :class:`UsageError` where an expression has no value for these sizes.
    """
    row = {name: dim.size for name, dim in dims.items() if dim.size is not None} | dict(sizes)
    _compute(dims, _order(dims), [row])
    return {name: row[name] for name in dims}


def mistakes(dims: Dims) -> list[tuple[str, str]]:
    """Return (dim, what is wrong with it) for every dim that has no size, or none within its own bounds."""
    found = [(name, text) for name, dim in dims.items() for text in _mistakes(name, dim, dims)]
    if not found and (cycle := _cycle(dims)):
        found = [(cycle[0], f"is computed from itself: {' -> '.join(cycle)}")]
    return found


def _mistakes(name: str, dim: Dim, dims: Dims) -> Iterator[str]:
    if dim.size is not None:
        return
    if dim.expression is not None:
        try:
            used = names(dim.expression)
        except UsageError as error:
            yield str(error)
            return
        yield from (f"{dim.expression!r} uses {other!r}, which is not a dim; {nearest(other, dims)}"
                    for other in sorted(used) if other not in dims)
    elif dim.buckets and dim.choices:
        yield "has both buckets and choices; expected one of them"
    elif dim.listed:
        yield from (f"{size} is outside the dim's own min, max or multiple_of"
                    for size in dim.listed if not dim.allows(size))
    elif dim.max is None:
        yield "has no size; expected buckets, choices or max"
    elif not dim.sizes:
        yield f"no multiple of {dim.multiple_of} lies between min {dim.min} and max {dim.max}"


def _cycle(dims: Dims) -> list[str] | None:
    """Return the names along a cycle of expressions, each computed from the next, if there is one."""
    try:
        _order(dims)
    except CycleError as error:
        cycle: list[str] = error.args[1]  # from the dim that is used to the dim that uses it
        return cycle[::-1]
    return None


def _uses(dim: Dim) -> frozenset[str]:
    return frozenset() if dim.expression is None else names(dim.expression)


def _order(dims: Dims) -> list[str]:
    """Return the computed dims, each after those that it uses."""
    graph = {name: _uses(dim) for name, dim in dims.items()}
    return [name for name in TopologicalSorter(graph).static_order() if dims[name].expression is not None]


def _listed(dims: Dims) -> list[dict[str, int]]:
    """Return the batches as far as numbers, buckets and choices say."""
    columns = {name: dim.listed if dim.size is None else (dim.size,) for name, dim in dims.items()}
    count = max(map(len, columns.values()), default=0) or 1
    return [{name: sizes[k % len(sizes)] for name, sizes in columns.items() if sizes} for k in range(count)]


def _compute(dims: Dims, order: Iterable[str], rows: list[dict[str, int]]) -> None:
    """Add every expression to the batches that have all it needs."""
    for row in rows:
        for name in order:
            text = dims[name].expression
            if text is not None and name not in row and names(text) <= row.keys():
                row[name] = evaluate(text, row)


def _with_size(dims: Dims, order: list[str], rows: list[dict[str, int]], name: str,
               sizes: range) -> list[dict[str, int]]:
    """Return the batches with a size for the free dim ``name``, the best by the rule of :func:`bindings`."""
    taken = {size for row in rows for size in row.values()}
    for size in islice(_outward(sizes), 1000):
        tried = [row | {name: size} for row in rows]
        try:
            _compute(dims, order, tried)
        except UsageError:
            continue  # some expression has no value there; if it has none anywhere, the last line says so
        new = [[value for key, value in row.items() if key not in rows[0]] for row in tried]
        if size > 1 and all(len({*values}) == len(values) and not taken & {*values} for values in new):
            return tried
    size = next((size for size in _outward(sizes) if size > 1), sizes[-1])
    tried = [row | {name: size} for row in rows]
    _compute(dims, order, tried)
    return tried


def _outward(sizes: range) -> Iterator[int]:
    """Yield the sizes from the middle outwards."""
    middle = (len(sizes) - 1) // 2
    for step in range(len(sizes)):
        place = middle + (step + 1) // 2 * (1 if step % 2 else -1)
        yield sizes[place]


def _up(size: int, step: int) -> int:
    """Return the least multiple of ``step`` that is at least ``size``."""
    return -(-size // step) * step
