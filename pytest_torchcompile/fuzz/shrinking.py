"""From a failing sequence to a minimal one.

Hypothesis shrinks the choices that made a value, which stalls on sizes ("a multiple of 8") and runs the
compiler for each try. Here calls are dropped and sizes replaced, and every try is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from pytest_torchcompile.dims import Dims, complete_sizes
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.drawn_call import DrawnCall, Sequence
from pytest_torchcompile.fuzz.sizes import candidates, free, ordered

__all__ = ["minimal"]

Fails = Callable[[Sequence], bool]


def minimal(sequence: Sequence, dims: Dims, fails: Fails) -> Sequence:
    """The sequence with calls dropped, sizes made simpler and mode switches removed for as long as it fails.

    The result is minimal: with any one of its calls dropped, or any one size replaced by a simpler candidate or
    the next simpler size, it no longer fails. ``fails`` is asked once for each sequence; it should return False
    when its budget is spent, which ends the shrinking where it stands.
    """
    tried: dict[Sequence, bool] = {sequence: True}

    def holds(other: Sequence) -> bool:
        if other not in tried:
            tried[other] = fails(other)
        return tried[other]

    while True:
        smaller = next((other for other in _simpler(sequence, dims) if other != sequence and holds(other)), None)
        if smaller is None:
            return sequence
        sequence = smaller


def _simpler(sequence: Sequence, dims: Dims) -> Iterator[Sequence]:
    """Simpler sequences, those first that save the most."""
    count = len(sequence)
    if count > 2:
        yield from (sequence[k:k + 1] for k in range(count))
        yield from (sequence[j:j + 1] + sequence[k:k + 1] for j in range(count) for k in range(j + 1, count))
    if count > 1:
        yield from (sequence[:k] + sequence[k + 1:] for k in reversed(range(count)))
    yield from (_with(sequence, k, replace(sequence[k], training=None))
                for k in range(count) if sequence[k].training is not None)
    for name in free(dims):  # the same size everywhere at once: what matters is often that two calls agree
        for size in {dict(each.sizes)[name]: None for each in sequence}:
            for other in candidates(dims[name], size):
                yield from _renamed(sequence, dims, name, {size: other})
            yield from _swapped(sequence, dims, name, size)
        yield from _raised(sequence, dims, name)
    yield from (_with(_with(sequence, j, sequence[k]), k, sequence[j])  # of two orders the one that starts simpler
                for j in range(count) for k in range(j + 1, count)
                if _rank(sequence[k], dims) < _rank(sequence[j], dims))
    for k in range(count):
        for name in free(dims):
            yield from _lower(sequence, dims, k, name)


def _lower(sequence: Sequence, dims: Dims, k: int, name: str) -> Iterator[Sequence]:
    """The k-th call with a simpler size of one dim: telling sizes, halfway between those, one or two less."""
    size = dict(sequence[k].sizes)[name]
    order = ordered(dims[name])
    simpler = candidates(dims[name], size)
    yield from _sized(sequence, dims, k, name, simpler)
    place = order.index(size) if size in order else 0
    below = max((order.index(other) for other in simpler), default=0)
    yield from _sized(sequence, dims, k, name, [
        order[at] for at in ((below + place) // 2, place - 2, place - 1) if 0 <= at < place])


def _sized(sequence: Sequence, dims: Dims, k: int, name: str, sizes: list[int]) -> Iterator[Sequence]:
    for size in sizes:
        if (other := _call(sequence[k], dims, {name: size})) is not None:
            yield _with(sequence, k, other)


def _rank(each: DrawnCall, dims: Dims) -> list[int]:
    sizes = dict(each.sizes)
    orders = [(ordered(dims[name]), sizes[name]) for name in free(dims)]
    return [order.index(size) if size in order else 0 for order, size in orders]


def _swapped(sequence: Sequence, dims: Dims, name: str, size: int) -> Iterator[Sequence]:
    """``size`` exchanged with each size that is used before it but is less simple."""
    order = {each: place for place, each in enumerate(ordered(dims[name]))}
    used = [dict(each.sizes)[name] for each in sequence]
    for other in dict.fromkeys(used[:used.index(size)]):
        if order.get(size, 0) < order.get(other, 0):
            yield from _renamed(sequence, dims, name, {size: other, other: size})


def _raised(sequence: Sequence, dims: Dims, name: str) -> Iterator[Sequence]:
    """Every size larger by so much that none is 0 or 1: what matters may be which call has the larger size."""
    used = {dict(each.sizes)[name] for each in sequence}
    if (least := min(used)) < 2:
        raised = {size: size + 2 - least for size in used}
        if set(raised.values()) <= set(ordered(dims[name])):
            yield from _renamed(sequence, dims, name, raised)


def _renamed(sequence: Sequence, dims: Dims, name: str, sizes: dict[int, int]) -> Iterator[Sequence]:
    made = [_call(each, dims, {name: sizes.get(old, old)}) for each in sequence for old in (dict(each.sizes)[name],)]
    kept = tuple(each for each in made if each is not None)
    if len(kept) == len(sequence):
        yield kept


def _call(each: DrawnCall, dims: Dims, sizes: dict[str, int]) -> DrawnCall | None:
    chosen = {name: size for name, size in each.sizes if name in free(dims)} | sizes
    try:
        return DrawnCall(tuple(complete_sizes(dims, chosen).items()), each.training)
    except UsageError:  # an expression of these sizes is no size
        return None


def _with(sequence: Sequence, k: int, each: DrawnCall) -> Sequence:
    return (*sequence[:k], each, *sequence[k + 1:])
