"""WRAPPERS: how a model is wrapped or made parallel before it is compiled.

To add one: a file in this folder, and its line here, which says on how many ranks it runs and in what mesh. A wrapper
of your own needs no line: name it ``module:attribute`` in the matrix, with ``*2`` behind it if it runs on two ranks.

Read ``wrapping`` (a value of the axis), ``protocol`` (what a wrapper is, and the compile orders), ``single_process``
(the simplest ones), then ``process_group`` with ``data_parallel``, ``tp``, ``simple_fsdp`` and ``pp``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["WRAPPERS", "WrapperEntry", "limits_of", "multiple_of"]


def multiple_of(axes: tuple[str, ...]) -> int:
    """What each number of ranks is a multiple of: the width of the mesh' last dimension, where it has two."""
    return min(len(axes), 2)


@dataclass(frozen=True, slots=True)
class WrapperEntry:
    """What is known of a wrapper without torch."""

    target: str
    """Where it is; loaded in the rank process that needs it."""
    ranks: int = 1
    """Processes that a cell has at least, and where the matrix does not say more."""
    axes: tuple[str, ...] = ("data",)
    """Dimensions of the mesh: see :attr:`~pytest_torchcompile.wrappers.protocol.Wrapper.axes`."""
    orders: tuple[str, ...] = ()
    """The compile orders that it has, the sensible one first: keys of
    :data:`~pytest_torchcompile.wrappers.wrapping.ORDERS`."""
    fake: bool = False
    """Does it run in torch's fake process group, as ``NAME*fake64``? DDP's reducer does not."""
    dtypes: tuple[str, ...] = ()
    """The dtypes that it computes in, as ``NAME@DTYPE``, the usual one first."""
    coverage: float = 1.0
    """The default of the limit ``coverage`` in its cells: less where it is its nature to leave layers to eager."""

    @property
    def multiple(self) -> int:
        """Any number of ranks is one of this."""
        return multiple_of(self.axes)


_HERE: Final = "pytest_torchcompile.wrappers"
_REPLICA_ORDERS: Final = ("compile_then_wrap", "wrap_then_compile", "inner_blocks")

WRAPPERS: Final[dict[str, WrapperEntry]] = {
    "none": WrapperEntry(f"{_HERE}.single_process:NONE"),
    "autocast": WrapperEntry(f"{_HERE}.single_process:AUTOCAST", dtypes=("bfloat16", "float16")),
    "checkpoint": WrapperEntry(f"{_HERE}.single_process:CHECKPOINT"),
    "regional": WrapperEntry(f"{_HERE}.single_process:REGIONAL", coverage=0),
    "ddp": WrapperEntry(f"{_HERE}.data_parallel:DDP", 2, orders=_REPLICA_ORDERS),
    "fsdp2": WrapperEntry(f"{_HERE}.data_parallel:FSDP2", 2,
                          orders=("inner_blocks", "compile_then_wrap", "wrap_then_compile"), fake=True, coverage=0),
    "ddp+checkpoint": WrapperEntry(f"{_HERE}.data_parallel:DDP_CHECKPOINT", 2, orders=_REPLICA_ORDERS),
    "fsdp1": WrapperEntry(f"{_HERE}.data_parallel:FSDP1", 2, orders=_REPLICA_ORDERS, coverage=0),
    "fsdp2+tp": WrapperEntry(f"{_HERE}.data_parallel:FSDP2_TP", 4, orders=("inner_blocks", "wrap_then_compile"),
                             axes=("data", "tensor"), fake=True, coverage=0),
    "pp": WrapperEntry(f"{_HERE}.pp:PP", 2, orders=("wrap_then_compile", "inner_blocks"), axes=("stage",)),
    "simple_fsdp": WrapperEntry(f"{_HERE}.simple_fsdp:SIMPLE_FSDP", 2, orders=("wrap_then_compile", "inner_blocks"),
                                fake=True),
    "simple_fsdp+tp": WrapperEntry(f"{_HERE}.simple_fsdp:SIMPLE_FSDP_TP", 4,
                                   orders=("wrap_then_compile", "inner_blocks"), axes=("data", "tensor"), fake=True),
    "tp": WrapperEntry(f"{_HERE}.tp:TP", 2, orders=("wrap_then_compile", "inner_blocks"), axes=("tensor",), fake=True),
}
"""Name in a matrix to what is known of it."""


def limits_of(wrapper: str) -> dict[str, float]:
    """The limits that a wrapper's cells have where no rule sets them; ``wrapper`` is a value of the axis."""
    name = wrapper.partition("*")[0].partition("@")[0]
    entry = WRAPPERS.get(name)
    if entry is None or entry.coverage == 1:
        return {}
    return {"coverage": entry.coverage}
