"""The compile order: a model is compiled whole before it is wrapped, after it, or block by block inside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers.blocks import compile_blocks
from pytest_torchcompile.wrappers.protocol import Settings
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["in_order"]


def in_order(model: nn.Module, settings: Settings | None, cell: Cell, wrap: Callable[[], Any]) -> Callable[..., Any]:
    """What ``wrap()`` makes of the model, compiled in the order that the cell asks for; eager without ``settings``.

    What is compiled before it is wrapped is compiled in place, so that ``wrap`` is about the model itself in every
    order. Raises :class:`~pytest_torchcompile.errors.UsageError` for ``inner_blocks`` of a model without any.
    """
    order = Wrapping.read(cell.wrapper).order
    if settings is not None and order == "compile_then_wrap":
        model.compile(**settings)
    elif settings is not None and order == "inner_blocks":
        compile_blocks(model, settings, cell)
    wrapped = wrap()
    if settings is not None and order == "wrap_then_compile":
        wrapped = torch.compile(wrapped, **settings)
    return wrapped  # type: ignore[no-any-return]
