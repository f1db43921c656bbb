"""Hypothesis strategies: sequences of calls that go where compiled code tends to break."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.dims import Dim, Dims, complete_sizes, dim_mistakes
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.drawn_call import DrawnCall, Sequence
from pytest_torchcompile.fuzz.sizes import constants, free, ordered, telling

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["shape_sequences", "sweep"]

Where = Callable[..., bool]


def shape_sequences(
    dims: Dims, max_calls: int = 6, *, flips: bool = False, others: Iterable[int] = (), where: Where | None = None,
) -> SearchStrategy[Sequence]:
    """A strategy for sequences of 1 to ``max_calls`` calls over the sizes of ``dims``.

    A third of the sizes are the ends of a dim's range, 0 to 3 and what is listed, a third telling ones
    (:func:`~pytest_torchcompile.fuzz.sizes.telling`), a third any. After the first call, a
    call is a new one, the last with one dim changed, an earlier one again, or one whose dims are all equal.
    ``flips`` adds switches between training and evaluation, ``others`` are sizes that dims may collide with,
    ``where`` is called with the sizes as keywords and says which belong together.
    Raises :class:`~pytest_torchcompile.errors.UsageError` for dims without sizes.
    """
    from hypothesis import strategies as st

    for name, text in dim_mistakes(dims):
        raise UsageError(f"dim {name!r}: {text}")
    names = free(dims)
    others = constants(dims) | set(others)
    pools = {name: st.sampled_from(_weighted(dims[name], others)) for name in names}
    shared = sorted(set.intersection(*(set(ordered(dims[name])) for name in names))) if len(names) > 1 else []
    ways = ["new", "one", "back", *(["equal"] if shared else [])] if names else ["back"]

    @st.composite
    def sequences(draw: Any) -> Sequence:
        drawn: list[dict[str, int]] = []
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
        modes = st.sampled_from((None, None, True, False)) if flips else st.none()
        return tuple(_call(dims, sizes, where, draw(modes)) for sizes in drawn)

    return sequences()


def sweep(
    dims: Dims, max_calls: int = 6, *, others: Iterable[int] = (), where: Where | None = None,
) -> list[Sequence]:
    """Sequences that between them have every telling size of every dim, in the order of the sizes.

    Hypothesis varies what it has drawn before, so that of few sequences whole sizes can be missing. Arguments as for
    :func:`shape_sequences`. Sizes that do not belong together are left out.
    """
    others = constants(dims) | set(others)
    columns = {name: telling(dims[name], others) for name in free(dims)}
    made = []
    for k in range(max(map(len, columns.values()), default=0)):
        sizes = _together(dims, {name: column[k % len(column)] for name, column in columns.items()}, where)
        if sizes is not None:
            made.append(DrawnCall(tuple(sizes.items())))
    return [tuple(made[k:k + max_calls]) for k in range(0, len(made), max_calls)]


def _weighted(dim: Dim, others: Iterable[int]) -> list[int]:
    """Every size once, and as many copies of the telling ones and of the ends."""
    order = ordered(dim)
    ends = [size for size in order if size in {0, 1, 2, 3, min(order), max(order), *dim.listed}]
    return [size for some in (order, telling(dim, others), ends) for size in some * -(-len(order) // len(some))]


def _call(dims: Dims, sizes: dict[str, int], where: Where | None, training: bool | None) -> DrawnCall:
    from hypothesis import reject

    every = _together(dims, sizes, where)
    if every is None:
        reject()
    return DrawnCall(tuple(every.items()), training)


def _together(dims: Dims, sizes: dict[str, int], where: Where | None) -> dict[str, int] | None:
    """All sizes of a call; None if they do not belong together, or an expression of them is no size."""
    try:
        every = complete_sizes(dims, sizes)
    except UsageError:
        return None
    return every if where is None or where(**every) else None
