"""A drawn call: the sizes that a batch is made for, and whether the model trains; and which sizes it may have.

Hypothesis strategies draw sequences of such calls, which go where compiled code tends to break.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.dims import Dim, Dims, complete_sizes, dim_mistakes
from pytest_torchcompile.errors import UsageError

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = [
    "WIDEST",
    "DrawnCall",
    "Sequence",
    "as_code",
    "as_plain",
    "call",
    "constant_sizes",
    "free_dims",
    "from_plain",
    "ordered_sizes",
    "shape_sequences",
    "simpler_sizes",
    "sweep",
    "telling_sizes",
    "varying_dims",
]


@dataclass(frozen=True, slots=True)
class DrawnCall:
    """One call of a sequence."""

    sizes: tuple[tuple[str, int], ...]
    """Every dim and its size, in the order of the dims."""
    training: bool | None = None
    """Switched to training mode or to evaluation; None: as it is."""
    mutations: tuple[tuple[str, str], ...] = ()
    """What else the caller does otherwise, each with its choice (:mod:`pytest_torchcompile.contract.mutation`)."""

    def __repr__(self) -> str:
        """``call(B=2, S=17)``: the code that makes it."""
        arguments = [f"{name}={size}" for name, size in self.sizes]
        if self.training is not None:
            arguments.append(f"training={self.training}")
        arguments += [f"{name}={choice!r}" for name, choice in self.mutations]
        return f"call({', '.join(arguments)})"


Sequence = tuple[DrawnCall, ...]


def call(*, training: bool | None = None, **sizes: int | str) -> DrawnCall:
    """A call by hand, for an ``@example``: ``call(B=2, S=17)``. Sizes are numbers, choices of mutations are texts."""
    numbers = tuple((name, size) for name, size in sizes.items() if not isinstance(size, str))
    mutations = tuple((name, choice) for name, choice in sizes.items() if isinstance(choice, str))
    return DrawnCall(numbers, training, mutations)


def as_code(sequence: Iterable[DrawnCall]) -> str:
    """A sequence as code to paste: ``[call(B=2), call(B=3)]``."""
    return f"[{', '.join(map(repr, sequence))}]"


def as_plain(sequence: Iterable[DrawnCall]) -> list[dict[str, Any]]:
    """A sequence as JSON-able data."""
    plain: list[dict[str, Any]] = []
    for each in sequence:
        plain.append({"sizes": dict(each.sizes), "training": each.training})
        if each.mutations:
            plain[-1]["mutations"] = dict(each.mutations)
    return plain


def from_plain(data: Iterable[Mapping[str, Any]]) -> Sequence:
    """The sequence that :func:`as_plain` wrote."""
    calls = []
    for each in data:
        mutations = tuple(each.get("mutations", {}).items())
        calls.append(DrawnCall(tuple(each["sizes"].items()), each["training"], mutations))
    return tuple(calls)


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


# ----------------------------------------------------------------------------------------------------------- strategies
Where = Callable[..., bool]


def shape_sequences(
    dims: Dims, max_calls: int = 6, *, flips: bool = False, others: Iterable[int] = (), where: Where | None = None,
    mutations: Mapping[str, list[str]] | None = None,
) -> SearchStrategy[Sequence]:
    """A strategy for sequences of 1 to ``max_calls`` calls over the sizes of ``dims``.

    A third of the sizes are the ends of a dim's range, 0 to 3 and what is listed, a third telling ones
    (:func:`~pytest_torchcompile.fuzz.drawn_call.telling_sizes`), a third any. After the first call, a
    call is a new one, the last with one dim changed, an earlier one again, or one whose dims are all equal.
    ``flips`` adds switches between training and evaluation, ``others`` are sizes that dims may collide with,
    ``where`` is called with the sizes as keywords and says which belong together. ``mutations`` has the choices of
    each mutation by its name: a call has none, one, two or three of them.
    Raises :class:`~pytest_torchcompile.errors.UsageError` for dims without sizes.
    """
    from hypothesis import strategies as st

    for name, text in dim_mistakes(dims):
        raise UsageError(f"dim {name!r}: {text}")
    names = free_dims(dims)
    others = constant_sizes(dims) | set(others)
    pools = {name: st.sampled_from(_weighted_sizes(dims[name], others)) for name in names}
    drawer = _SizesDrawer(pools, _shared_sizes(dims, names))
    # Most calls leave the mode as it is: each switch compiles anew.
    modes: SearchStrategy[bool | None] = st.none()
    if flips:
        modes = st.sampled_from((None, None, True, False))
    offered = dict(mutations or {})

    @st.composite
    def draw_sequence(draw: Any) -> Sequence:
        drawn: list[dict[str, int]] = []
        for _ in range(draw(st.integers(1, max_calls))):
            drawn.append(drawer.draw_after(drawn, draw))
        calls = []
        for sizes in drawn:
            plain = _drawn_call(dims, sizes, where, draw(modes))
            calls.append(replace(plain, mutations=_draw_mutations(offered, draw)))
        return tuple(calls)

    return draw_sequence()


@dataclass(frozen=True, slots=True)
class _SizesDrawer:
    """Draws the sizes of a call in relation to those before it, for on these depends what torch compiles."""

    pools: Mapping[str, SearchStrategy[int]]
    """Free dim to what its size is drawn from."""
    shared: list[int]
    """The sizes that all free dims may have at once."""

    @property
    def ways(self) -> list[str]:
        """How a call may be related to those before it."""
        # Without a free dim all calls are equal: there is nothing but to repeat the first.
        if not self.pools:
            return ["back"]
        if not self.shared:
            return ["new", "one", "back"]
        return ["new", "one", "back", "equal"]

    def draw_after(self, drawn: list[dict[str, int]], draw: Any) -> dict[str, int]:
        """The free sizes of the next call."""
        from hypothesis import strategies as st

        way = draw(st.sampled_from(self.ways)) if drawn else "new"
        if way == "new":
            return {name: draw(pool) for name, pool in self.pools.items()}
        if way == "one":
            name = draw(st.sampled_from(list(self.pools)))
            return drawn[-1] | {name: draw(self.pools[name])}
        if way == "back":
            earlier: dict[str, int] = draw(st.sampled_from(drawn))
            return earlier
        return dict.fromkeys(self.pools, draw(st.sampled_from(self.shared)))


def _draw_mutations(offered: Mapping[str, list[str]], draw: Any) -> tuple[tuple[str, str], ...]:
    from hypothesis import strategies as st

    if not offered:
        return ()
    # Two at once find what one does not; one is drawn twice as often, as it is the smallest example there is.
    names = draw(st.permutations(list(offered)))[:draw(st.sampled_from((0, 1, 1, 2, 3)))]
    # In the order in which they are offered, so that the same ones are the same call.
    return tuple((name, draw(st.sampled_from(offered[name]))) for name in offered if name in names)


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
    # Side by side, not all with all: as many calls as the longest list, however many dims there are.
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
    # 0 and 1 are compiled apart; 2 and 3 are the smallest sizes that are not.
    wanted = {0, 1, 2, 3, min(order), max(order), *dim.listed}
    ends = [size for size in order if size in wanted]
    weighted: list[int] = []
    for some in (order, telling_sizes(dim, others), ends):
        # Rounded up, so that each third is drawn at least as often as the list of all.
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
