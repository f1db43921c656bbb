"""regional: each repeated block is compiled on its own, the module around them stays eager.

Blocks of one class share their compiled code, so that a deep model compiles as fast as a shallow one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper
from pytest_torchcompile.wrappers.repeated_blocks import compile_blocks, repeated_blocks

__all__ = ["REGIONAL"]


def _wrap(model: nn.Module, settings: Settings | None, cell: Cell) -> Callable[..., Any]:
    repeated_blocks(model, cell)  # eager too: a model without any has no such cell
    if settings is not None:
        compile_blocks(model, settings, cell)
    return model


REGIONAL = Wrapper("regional", _wrap, partial=True)
