"""From a failing sequence to a minimal one.

Hypothesis shrinks the choices that made a value, which stalls on sizes ("a multiple of 8") and runs the
compiler for each try. Here calls are dropped and sizes replaced, and every try is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

from pytest_torchcompile.dims import Dims, complete_sizes
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.drawn_call import DrawnCall, Sequence, free_dims, ordered_sizes, simpler_sizes

__all__ = ["minimal"]

Fails = Callable[[Sequence], bool]


def minimal(sequence: Sequence, dims: Dims, fails: Fails) -> Sequence:
    """The sequence with calls dropped, sizes made simpler and mode switches removed for as long as it fails.

    The result is minimal: with any one of its calls dropped, or any one size replaced by a simpler candidate or
    the next simpler size, it no longer fails. ``fails`` is asked once for each sequence; it should return False
    when its budget is spent, which ends the shrinking where it stands.
    """
    tried: dict[Sequence, bool] = {sequence: True}

    def still_fails(other: Sequence) -> bool:
        # An attempt compiles, which takes seconds; many ways of simplifying lead to the same sequence.
        if other not in tried:
            tried[other] = fails(other)
        return tried[other]

    # From the start again after each success: what was impossible before may be possible now.
    while True:
        for simpler in _simpler_sequences(sequence, dims):
            if simpler != sequence and still_fails(simpler):
                sequence = simpler
                break
        else:
            return sequence


def _simpler_sequences(sequence: Sequence, dims: Dims) -> Iterator[Sequence]:
    """Simpler sequences, those first that save the most."""
    yield from _fewer_calls(sequence)
    for place, each in enumerate(sequence):
        if each.training is not None:
            yield _with_call(sequence, place, replace(each, training=None))
        for left_out in each.mutations:
            others = tuple(mutation for mutation in each.mutations if mutation != left_out)
            yield _with_call(sequence, place, replace(each, mutations=others))
    # The same size everywhere at once: what matters is often that two calls agree.
    for name in free_dims(dims):
        for size in dict.fromkeys(_used_sizes(sequence, name)):
            for other in simpler_sizes(dims[name], size):
                yield from _renamed_sizes(sequence, dims, name, {size: other})
            yield from _swapped_sizes(sequence, dims, name, size)
        yield from _raised_sizes(sequence, dims, name)
    # Of two orders the one that starts simpler.
    for first, second in combinations(range(len(sequence)), 2):
        if _size_ranks(sequence[second], dims) < _size_ranks(sequence[first], dims):
            swapped = _with_call(sequence, first, sequence[second])
            yield _with_call(swapped, second, sequence[first])
    for place in range(len(sequence)):
        for name in free_dims(dims):
            yield from _lower_sizes(sequence, dims, place, name)


def _fewer_calls(sequence: Sequence) -> Iterator[Sequence]:
    """One call alone, two calls alone, then all but one, the last first."""
    count = len(sequence)
    # The most that can be saved: nearly every fault needs one call or two.
    if count > 2:
        for each in sequence:
            yield (each,)
        yield from combinations(sequence, 2)
    if count > 1:
        for place in reversed(range(count)):
            yield sequence[:place] + sequence[place + 1:]


def _lower_sizes(sequence: Sequence, dims: Dims, place: int, name: str) -> Iterator[Sequence]:
    """One call with a simpler size of one dim: telling sizes, halfway between those, one or two less."""
    size = dict(sequence[place].sizes)[name]
    order = ordered_sizes(dims[name])
    simpler = simpler_sizes(dims[name], size)
    rank = _rank_of(size, order)
    below = max((order.index(other) for other in simpler), default=0)
    steps = [(below + rank) // 2, rank - 2, rank - 1]
    for other in (*simpler, *(order[step] for step in steps if 0 <= step < rank)):
        if (call := _resized_call(sequence[place], dims, {name: other})) is not None:
            yield _with_call(sequence, place, call)


def _rank_of(size: int, order: list[int]) -> int:
    return order.index(size) if size in order else 0


def _size_ranks(each: DrawnCall, dims: Dims) -> list[int]:
    sizes = dict(each.sizes)
    return [_rank_of(sizes[name], ordered_sizes(dims[name])) for name in free_dims(dims)]


def _used_sizes(sequence: Sequence, name: str) -> list[int]:
    return [dict(each.sizes)[name] for each in sequence]


def _swapped_sizes(sequence: Sequence, dims: Dims, name: str, size: int) -> Iterator[Sequence]:
    """``size`` exchanged with each size that is used before it but is less simple."""
    ranks = {each: rank for rank, each in enumerate(ordered_sizes(dims[name]))}
    used = _used_sizes(sequence, name)
    for other in dict.fromkeys(used[:used.index(size)]):
        if ranks.get(size, 0) < ranks.get(other, 0):
            yield from _renamed_sizes(sequence, dims, name, {size: other, other: size})


def _raised_sizes(sequence: Sequence, dims: Dims, name: str) -> Iterator[Sequence]:
    """Every size larger by so much that none is 0 or 1: what matters may be which call has the larger size."""
    used = set(_used_sizes(sequence, name))
    least = min(used)
    if least < 2:
        raised = {size: size + 2 - least for size in used}
        if set(raised.values()) <= set(ordered_sizes(dims[name])):
            yield from _renamed_sizes(sequence, dims, name, raised)


def _renamed_sizes(sequence: Sequence, dims: Dims, name: str, sizes: dict[int, int]) -> Iterator[Sequence]:
    """The sequence with other sizes of one dim, unless that makes a call impossible."""
    calls: list[DrawnCall] = []
    for each in sequence:
        old = dict(each.sizes)[name]
        call = _resized_call(each, dims, {name: sizes.get(old, old)})
        if call is None:
            return
        calls.append(call)
    yield tuple(calls)


def _resized_call(each: DrawnCall, dims: Dims, sizes: dict[str, int]) -> DrawnCall | None:
    free = free_dims(dims)
    chosen = {name: size for name, size in each.sizes if name in free} | sizes
    try:
        return replace(each, sizes=tuple(complete_sizes(dims, chosen).items()))
    except UsageError:
        # An expression of these sizes is no size.
        return None


def _with_call(sequence: Sequence, place: int, call: DrawnCall) -> Sequence:
    return (*sequence[:place], call, *sequence[place + 1:])
