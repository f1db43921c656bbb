"""A drawn call: the sizes that a batch is made for, and whether the model trains; and which sizes it may have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_torchcompile.dims import Dim, Dims

__all__ = ["WIDEST", "DrawnCall", "Sequence", "as_code", "as_plain", "call", "constant_sizes", "free_dims",
           "from_plain", "ordered_sizes", "simpler_sizes", "telling_sizes", "varying_dims"]


@dataclass(frozen=True, slots=True)
class DrawnCall:
    """One call of a sequence."""

    sizes: tuple[tuple[str, int], ...]
    """Every dim and its size, in the order of the dims."""
    training: bool | None = None
    """Switched to training mode or to evaluation; None: as it is."""

    def __repr__(self) -> str:
        """``call(B=2, S=17)``: the code that makes it."""
        arguments = [f"{name}={size}" for name, size in self.sizes]
        if self.training is not None:
            arguments.append(f"training={self.training}")
        return f"call({', '.join(arguments)})"


Sequence = tuple[DrawnCall, ...]


def call(*, training: bool | None = None, **sizes: int) -> DrawnCall:
    """A call by hand, for an ``@example``: ``call(B=2, S=17)``."""
    return DrawnCall(tuple(sizes.items()), training)


def as_code(sequence: Iterable[DrawnCall]) -> str:
    """A sequence as code to paste: ``[call(B=2), call(B=3)]``."""
    return f"[{', '.join(map(repr, sequence))}]"


def as_plain(sequence: Iterable[DrawnCall]) -> list[dict[str, Any]]:
    """A sequence as JSON-able data."""
    return [{"sizes": dict(each.sizes), "training": each.training} for each in sequence]


def from_plain(data: Iterable[Mapping[str, Any]]) -> Sequence:
    """The sequence that :func:`as_plain` wrote."""
    return tuple(DrawnCall(tuple(each["sizes"].items()), each["training"]) for each in data)


# The sizes that a dim may take in a drawn sequence: simplest first, and those that are worth more tries.

WIDEST = 4096
"""So many sizes of a dim are listed; of a wider one only the telling sizes and a grid between them are drawn."""


def free_dims(dims: Dims) -> list[str]:
    """The dims that have more than one size; the others are numbers or expressions."""
    return [name for name, dim in dims.items() if dim.size is None and dim.expression is None]


def varying_dims(dims: Dims) -> list[str]:
    """The free dims of which there is more than one size to draw."""
    return [name for name in free_dims(dims) if len(ordered_sizes(dims[name])) > 1]


def constant_sizes(dims: Dims) -> set[int]:
    """The sizes of the dims that have one only."""
    return {dim.size for dim in dims.values() if dim.size is not None}


def ordered_sizes(dim: Dim) -> list[int]:
    """The sizes of a free dim, simplest first.

    2 is the plainest size. torch compiles 1 and 0 apart, so they come last: a shrunk sequence has them only
    where they matter.
    """
    sizes = sorted(set(dim.listed)) or _spread_sizes(dim)
    return [size for size in sizes if size > 1] + [size for size in (1, 0) if size in sizes]


def _spread_sizes(dim: Dim) -> list[int]:
    every = dim.sizes
    if len(every) <= WIDEST:
        return list(every)
    grid = every[:: len(every) // WIDEST + 1]
    # The small sizes, where most special cases are, and the neighbours of powers of two.
    powers = [size for size in _powers_of_two(every[-1]) if size in every]
    return sorted({*grid, *every[:256], every[-1], *powers})


def telling_sizes(dim: Dim, others: Iterable[int] = ()) -> list[int]:
    """Sizes at which something tends to change: the ends, powers of two and their neighbours, and ``others``.

    ``others`` are sizes that torch may give the same symbol (duck shapes): those of constant dims and of parameters.
    """
    sizes = ordered_sizes(dim)
    wanted = {*sizes[:2], min(sizes), max(sizes), *others, *_powers_of_two(max(sizes))}
    return [size for size in sizes if size in wanted]


def _powers_of_two(most: int) -> Iterator[int]:
    power = 1
    while power // 2 <= most:
        yield from (power - 1, power, power + 1)
        power *= 2


def simpler_sizes(dim: Dim, size: int) -> list[int]:
    """Simpler sizes than ``size``, the ones to try when shrinking: the telling ones, simplest first."""
    simpler = ordered_sizes(dim)
    if size in simpler:
        simpler = simpler[:simpler.index(size)]
    before = set(simpler)
    return [other for other in telling_sizes(dim) if other in before]
