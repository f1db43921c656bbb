"""WRAPPERS: how a model is wrapped or made parallel before it is compiled.

To add one: a file in this folder, and its line here. A wrapper of your own needs no line: name it
``module:attribute`` in the matrix, with ``*2`` behind it if it runs on two ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["WRAPPERS", "WrapperEntry", "limits_of"]


@dataclass(frozen=True, slots=True)
class WrapperEntry:
    """What is known of a wrapper without torch."""

    target: str
    """Where it is; loaded in the rank process that needs it."""
    ranks: int = 1
    """Processes that a cell has at least, and where the matrix does not say more."""
    multiple: int = 1
    """Any number of ranks is one of this: the width of the mesh' last dimension, where it has two."""
    orders: tuple[str, ...] = ()
    """The compile orders that it has, the sensible one first: keys of
    :data:`~pytest_torchcompile.wrappers.wrapping.ORDERS`."""
    fake: bool = False
    """Does it run in torch's fake process group, as ``NAME*fake64``? DDP's reducer does not."""
    coverage: float = 1.0
    """The default of the limit ``coverage`` in its cells: less where it is its nature to leave layers to eager."""


_HERE: Final = "pytest_torchcompile.wrappers"

WRAPPERS: Final[dict[str, WrapperEntry]] = {
    "none": WrapperEntry(f"{_HERE}.none:NONE"),
    "autocast": WrapperEntry(f"{_HERE}.autocast:AUTOCAST"),
    "checkpoint": WrapperEntry(f"{_HERE}.checkpoint:CHECKPOINT"),
    "regional": WrapperEntry(f"{_HERE}.regional:REGIONAL", coverage=0),
    "ddp": WrapperEntry(f"{_HERE}.ddp:DDP", 2, orders=("compile_then_wrap", "wrap_then_compile", "inner_blocks")),
    "fsdp2": WrapperEntry(f"{_HERE}.fsdp2:FSDP2", 2,
                          orders=("inner_blocks", "compile_then_wrap", "wrap_then_compile"), fake=True, coverage=0),
    "ddp+checkpoint": WrapperEntry(f"{_HERE}.ddp_checkpoint:DDP_CHECKPOINT", 2,
                                   orders=("compile_then_wrap", "wrap_then_compile", "inner_blocks")),
    "fsdp1": WrapperEntry(f"{_HERE}.fsdp1:FSDP1", 2, orders=("compile_then_wrap", "wrap_then_compile", "inner_blocks"),
                          coverage=0),
    "fsdp2+tp": WrapperEntry(f"{_HERE}.fsdp2_tp:FSDP2_TP", 4, orders=("inner_blocks", "wrap_then_compile"), multiple=2,
                             fake=True, coverage=0),
    "pp": WrapperEntry(f"{_HERE}.pp:PP", 2, orders=("wrap_then_compile", "inner_blocks")),
    "tp": WrapperEntry(f"{_HERE}.tp:TP", 2, orders=("wrap_then_compile", "inner_blocks"), fake=True),
}
"""Name in a matrix to what is known of it."""


def limits_of(wrapper: str) -> dict[str, float]:
    """The limits that a wrapper's cells have where no rule sets them; ``wrapper`` is a value of the axis."""
    name = wrapper.partition("*")[0].partition("@")[0]
    entry = WRAPPERS.get(name)
    return {} if entry is None or entry.coverage == 1 else {"coverage": entry.coverage}
