"""The sizes that a dim may take in a drawn sequence: simplest first, and those that are worth more tries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pytest_torchcompile.dims import Dim, Dims

__all__ = ["WIDEST", "candidates", "constants", "free", "ordered", "telling", "varying"]

WIDEST = 4096
"""So many sizes of a dim are listed; of a wider one only the telling sizes and a grid between them are drawn."""


def free(dims: Dims) -> list[str]:
    """The dims that have more than one size; the others are numbers or expressions."""
    return [name for name, dim in dims.items() if dim.size is None and dim.expression is None]


def varying(dims: Dims) -> list[str]:
    """The free dims of which there is more than one size to draw."""
    return [name for name in free(dims) if len(ordered(dims[name])) > 1]


def constants(dims: Dims) -> set[int]:
    """The sizes of the dims that have one only."""
    return {dim.size for dim in dims.values() if dim.size is not None}


def ordered(dim: Dim) -> list[int]:
    """The sizes of a free dim, simplest first.

    2 is the plainest size. torch compiles 1 and 0 apart, so they come last: a shrunk sequence has them only
    where they matter.
    """
    sizes = sorted(set(dim.listed)) if dim.listed else _spread(dim)
    return [s for s in sizes if s > 1] + [s for s in (1, 0) if s in sizes]


def _spread(dim: Dim) -> list[int]:
    every = dim.sizes
    if len(every) <= WIDEST:
        return list(every)
    grid = every[:: len(every) // WIDEST + 1]
    return sorted({*grid, *every[:256], every[-1], *(s for s in _powers(every[-1]) if s in every)})


def telling(dim: Dim, others: Iterable[int] = ()) -> list[int]:
    """Sizes at which something tends to change: the ends, powers of two and their neighbours, and ``others``.

    ``others`` are sizes that torch may give the same symbol (duck shapes): those of constant dims and of parameters.
    """
    sizes = ordered(dim)
    wanted = {*sizes[:2], min(sizes), max(sizes), *others, *_powers(max(sizes))}
    return [size for size in sizes if size in wanted]


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power // 2 <= most:
        yield from (power - 1, power, power + 1)
        power *= 2


def candidates(dim: Dim, size: int) -> list[int]:
    """Simpler sizes than ``size``, the ones to try when shrinking: the telling ones, simplest first."""
    order = ordered(dim)
    before = set(order[: order.index(size)]) if size in order else set(order)
    return [other for other in telling(dim) if other in before]
