"""Hypothesis strategies: sequences of calls that go where compiled code tends to break."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.dims import Dim, Dims, complete_sizes, dim_mistakes
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.drawn_call import (
    DrawnCall,
    Sequence,
    constant_sizes,
    free_dims,
    ordered_sizes,
    telling_sizes,
)

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["shape_sequences", "sweep"]

Where = Callable[..., bool]


def shape_sequences(
    dims: Dims, max_calls: int = 6, *, flips: bool = False, others: Iterable[int] = (), where: Where | None = None,
) -> SearchStrategy[Sequence]:
    """A strategy for sequences of 1 to ``max_calls`` calls over the sizes of ``dims``.

    A third of the sizes are the ends of a dim's range, 0 to 3 and what is listed, a third telling ones
    (:func:`~pytest_torchcompile.fuzz.drawn_call.telling_sizes`), a third any. After the first call, a
    call is a new one, the last with one dim changed, an earlier one again, or one whose dims are all equal.
    ``flips`` adds switches between training and evaluation, ``others`` are sizes that dims may collide with,
    ``where`` is called with the sizes as keywords and says which belong together.
    Raises :class:`~pytest_torchcompile.errors.UsageError` for dims without sizes.
    """
    from hypothesis import strategies as st

    for name, text in dim_mistakes(dims):
        raise UsageError(f"dim {name!r}: {text}")
    names = free_dims(dims)
    others = constant_sizes(dims) | set(others)
    pools = {name: st.sampled_from(_weighted_sizes(dims[name], others)) for name in names}
    shared = _shared_sizes(dims, names)
    # Without a free dim all calls are equal: there is nothing but to repeat the first.
    ways = ["back"]
    if names:
        ways = ["new", "one", "back"]
    if shared:
        ways.append("equal")
    modes: SearchStrategy[bool | None] = st.none()
    if flips:
        modes = st.sampled_from((None, None, True, False))

    @st.composite
    def draw_sequence(draw: Any) -> Sequence:
        drawn: list[dict[str, int]] = []
        # What torch compiles depends on the sizes before, so a call is drawn in relation to those.
        for place in range(draw(st.integers(1, max_calls))):
            way = draw(st.sampled_from(ways)) if place else "new"
            if way == "new":
                drawn.append({name: draw(pool) for name, pool in pools.items()})
            elif way == "one":
                name = draw(st.sampled_from(names))
                drawn.append(drawn[-1] | {name: draw(pools[name])})
            elif way == "back":
                drawn.append(draw(st.sampled_from(drawn)))
            else:
                drawn.append(dict.fromkeys(names, draw(st.sampled_from(shared))))
        return tuple(_drawn_call(dims, sizes, where, draw(modes)) for sizes in drawn)

    return draw_sequence()


def _shared_sizes(dims: Dims, names: list[str]) -> list[int]:
    """The sizes that all of several dims may have at once."""
    if len(names) < 2:
        return []
    return sorted(set.intersection(*(set(ordered_sizes(dims[name])) for name in names)))


def sweep(
    dims: Dims, max_calls: int = 6, *, others: Iterable[int] = (), where: Where | None = None,
) -> list[Sequence]:
    """Sequences that between them have every telling size of every dim, in the order of the sizes.

    Hypothesis varies what it has drawn before, so that of few sequences whole sizes can be missing. Arguments as for
    :func:`shape_sequences`. Sizes that do not belong together are left out.
    """
    others = constant_sizes(dims) | set(others)
    columns = {name: telling_sizes(dims[name], others) for name in free_dims(dims)}
    calls = []
    for row in range(max(map(len, columns.values()), default=0)):
        # A dim with fewer sizes begins again.
        chosen = {name: column[row % len(column)] for name, column in columns.items()}
        sizes = _complete_sizes(dims, chosen, where)
        if sizes is not None:
            calls.append(DrawnCall(tuple(sizes.items())))
    return [tuple(calls[start:start + max_calls]) for start in range(0, len(calls), max_calls)]


def _weighted_sizes(dim: Dim, others: Iterable[int]) -> list[int]:
    """Every size once, and as many copies of the telling ones and of the ends."""
    order = ordered_sizes(dim)
    ends = [size for size in order if size in {0, 1, 2, 3, min(order), max(order), *dim.listed}]
    weighted: list[int] = []
    for some in (order, telling_sizes(dim, others), ends):
        copies = -(-len(order) // len(some))
        weighted += some * copies
    return weighted


def _drawn_call(dims: Dims, sizes: dict[str, int], where: Where | None, training: bool | None) -> DrawnCall:
    from hypothesis import reject

    every = _complete_sizes(dims, sizes, where)
    if every is None:
        reject()
    return DrawnCall(tuple(every.items()), training)


def _complete_sizes(dims: Dims, sizes: dict[str, int], where: Where | None) -> dict[str, int] | None:
    """All sizes of a call; None if they do not belong together, or an expression of them is no size."""
    try:
        every = complete_sizes(dims, sizes)
    except UsageError:
        return None
    if where is not None and not where(**every):
        return None
    return every
