"""Wrapping: a value of the axis ``wrapper``, read. No torch.

    NAME                 ddp
    NAME@ORDER           ddp@wrap_then_compile
    NAME@DTYPE           autocast@float16
    NAME*RANKS           ddp*4
    NAME@ORDER*RANKS     mypkg.parallel:wrap@inner_blocks*4
    NAME*fakeRANKS       fsdp2*fake64

``fake`` ranks are one process in torch's fake process group, whose collectives do nothing: it compiles as rank 0 of so
many would, and its numbers mean nothing. ``NAME`` is a key of :data:`~pytest_torchcompile.wrappers.WRAPPERS`, or
``module:attribute``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from pytest_torchcompile.errors import nearest
from pytest_torchcompile.wrappers import WRAPPERS, WrapperEntry

__all__ = ["LANES", "ORDERS", "Wrapping", "lane_of", "numbers_of_ranks", "processes_of", "wrapper_of"]

ORDERS: Final[dict[str, str]] = {
    "compile_then_wrap": "the model is compiled whole, and what came of it is wrapped",
    "wrap_then_compile": "the model is wrapped, and the whole of it compiled",
    "inner_blocks": "each repeated block is compiled by itself, and the model wrapped around them",
}
"""Compile order to what it means."""


LANES: Final[dict[str, str]] = {
    "single": "one process",
    "ranks": "a process for each rank, in a real process group",
    "fake": "one process in a fake process group: what compiles is judged, and no number",
}
"""Lane of a cell to what it runs in."""
_FAKE: Final = "fake"


@dataclass(frozen=True, slots=True)
class Wrapping:
    """What a value of the axis asks for."""

    name: str
    order: str = ""
    """A key of :data:`ORDERS`; empty: there is one way only, or it is the wrapper's to choose."""
    ranks: int = 1
    dtype: str = ""
    """What it computes in; empty: the wrapper brings no dtype in."""
    fake: bool = False
    """All ranks but the first are only said to be there."""

    @property
    def processes(self) -> int:
        """How many it runs in."""
        return 1 if self.fake else self.ranks

    @property
    def lane(self) -> str:
        """A key of :data:`LANES`."""
        if self.fake:
            return _FAKE
        if self.ranks > 1:
            return "ranks"
        return "single"

    @classmethod
    @lru_cache(maxsize=1024)
    def read(cls, value: str) -> Wrapping:
        """Read a value of the axis: once in a process, however many rooms ask for it.

        Raises ValueError with a text that says what was found and what was expected. Whether a ``module:attribute``
        is there is not asked here.
        """
        text, star, ranks = value.partition("*")
        if "@" in ranks:
            number, _, order = ranks.partition("@")
            raise ValueError(f"{value!r}: the order comes before the ranks; write {text}@{order}*{number}")
        name, at, order = text.partition("@")
        entry = WRAPPERS.get(name)
        if entry is None and ":" not in name:
            raise ValueError(f"{name!r} is not a wrapper, nor module:attribute; {nearest(name, WRAPPERS)}")
        dtype = ""
        if entry is not None and entry.dtypes:
            dtype, order = _read_dtype(name, order, entry), ""
        elif at:
            _check_order(name, order, entry)
        # The first order that a wrapper names is its default.
        elif entry is not None and entry.orders:
            order = entry.orders[0]
        fake = bool(star) and ranks.startswith(_FAKE)
        if fake and entry is not None and not entry.fake:
            raise ValueError(f"wrapper {name!r} has no fake lane, found *{ranks}; {_who_has_fake_lane()}")
        if star:
            count = _read_ranks(value, ranks.removeprefix(_FAKE), entry)
        elif entry is not None:
            count = entry.ranks
        else:
            count = 1
        return cls(name, order, count, dtype, fake)


def lane_of(value: object) -> str:
    """The lane of a cell with this value of the axis; ``single`` for one that this version cannot read."""
    try:
        # A report of another version may name an order that is unknown here, and is shown all the same.
        return Wrapping.read(str(value)).lane
    except ValueError:
        return "single"


def processes_of(value: object, unknown: int) -> int:
    """In how many processes a cell with this value of the axis runs; ``unknown`` for one that can't be read here."""
    try:
        return Wrapping.read(str(value)).processes
    except ValueError:
        return unknown


def wrapper_of(value: object) -> str:
    """The wrapper that a value of the axis names, without its order and ranks."""
    return str(value).partition("*")[0].partition("@")[0]


def _who_has_fake_lane() -> str:
    names = [name for name, entry in WRAPPERS.items() if entry.fake]
    return f"it is for {', '.join(names)} and wrappers of your own"


def _read_dtype(name: str, text: str, entry: WrapperEntry) -> str:
    if not text:
        return entry.dtypes[0]
    if text not in entry.dtypes:
        raise ValueError(f"wrapper {name!r} has no dtype {text!r}; {nearest(text, entry.dtypes)}")
    return text


def _check_order(name: str, order: str, entry: WrapperEntry | None) -> None:
    if order not in ORDERS:
        raise ValueError(f"wrapper {name!r}: {order!r} is not a compile order; {nearest(order, ORDERS)}")
    # One of the user's own may have any: whether it can be told the order is asked when it is loaded.
    if entry is None or order in entry.orders:
        return
    has = f"it has {', '.join(entry.orders)}" if entry.orders else "it has one way only"
    raise ValueError(f"wrapper {name!r} has no compile order {order!r}; {has}")


def _read_ranks(value: str, text: str, entry: WrapperEntry | None) -> int:
    name = value.partition("*")[0]
    if not text.isdecimal() or not int(text):
        raise ValueError(f"wrapper {value!r}: {text!r} is not a number of ranks; expected for example {name}*2")
    ranks = int(text)
    if entry is None:
        return ranks
    if entry.ranks == 1 and ranks > 1:
        raise ValueError(f"wrapper {name!r} runs in one rank, found *{ranks}; take it off")
    if ranks < entry.ranks or ranks % entry.multiple:
        raise ValueError(f"wrapper {name!r} runs on {numbers_of_ranks(entry.ranks, entry.multiple)}, found *{ranks}")
    return ranks


def numbers_of_ranks(least: int, multiple: int) -> str:
    """``2, 3, 4, ... ranks``: those that a wrapper can have."""
    # The least one, rounded up to a multiple: minus is there because // rounds down.
    first = -(-least // multiple) * multiple
    some = range(first, least + 3 * multiple, multiple)
    return f"{', '.join(map(str, some))}, ... ranks"
