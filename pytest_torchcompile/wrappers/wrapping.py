"""Wrapping: a value of the axis ``wrapper``, read. No torch.

    NAME                 ddp
    NAME@ORDER           ddp@wrap_then_compile
    NAME*RANKS           ddp*4
    NAME@ORDER*RANKS     mypkg.parallel:wrap@inner_blocks*4

``NAME`` is a key of :data:`~pytest_torchcompile.wrappers.WRAPPERS`, or ``module:attribute``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pytest_torchcompile.errors import nearest
from pytest_torchcompile.wrappers import WRAPPERS

__all__ = ["ORDERS", "Wrapping"]

ORDERS: Final[dict[str, str]] = {
    "compile_then_wrap": "the model is compiled whole, and what came of it is wrapped",
    "wrap_then_compile": "the model is wrapped, and the whole of it compiled",
    "inner_blocks": "each repeated block is compiled by itself, and the model wrapped around them",
}
"""Compile order to what it means."""


@dataclass(frozen=True, slots=True)
class Wrapping:
    """What a value of the axis asks for."""

    name: str
    order: str = ""
    """A key of :data:`ORDERS`; empty: there is one way only, or it is the wrapper's to choose."""
    ranks: int = 1

    @classmethod
    def read(cls, value: str) -> Wrapping:
        """Read a value of the axis.

        Raises ValueError with a text that says what was found and what was expected. Whether a ``module:attribute``
        is there is not asked here.
        """
        text, star, ranks = value.partition("*")
        name, at, order = text.partition("@")
        entry = WRAPPERS.get(name)
        if entry is None and ":" not in name:
            raise ValueError(f"{name!r} is not a wrapper, nor module:attribute; {nearest(name, WRAPPERS)}")
        if at:
            _check_order(name, order, ORDERS if entry is None else entry.orders)
        least = 1 if entry is None else entry.ranks
        return cls(name, order if at else (entry.orders[0] if entry and entry.orders else ""),
                   _ranks(value, ranks, least, several=entry is None) if star else least)


def _check_order(name: str, order: str, known: object) -> None:
    if order not in ORDERS:
        raise ValueError(f"wrapper {name!r}: {order!r} is not a compile order; {nearest(order, ORDERS)}")
    if not isinstance(known, (tuple, dict)) or order not in known:
        has = f"it has {', '.join(known)}" if isinstance(known, tuple) and known else "it has one way only"
        raise ValueError(f"wrapper {name!r} has no compile order {order!r}; {has}")


def _ranks(value: str, text: str, step: int, several: bool) -> int:
    name = value.partition("*")[0]
    if not text.isdecimal() or not int(text):
        raise ValueError(f"wrapper {value!r}: {text!r} is not a number of ranks; expected for example {name}*2")
    ranks = int(text)
    if step == 1 and ranks > 1 and not several:
        raise ValueError(f"wrapper {name!r} runs in one rank, found *{ranks}; take it off")
    if ranks % step:
        raise ValueError(f"wrapper {name!r} needs a multiple of {step} ranks, found *{ranks}")
    return ranks
