"""The compile order: a model is compiled whole before it is wrapped, after it, or block by block inside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers.protocol import Settings
from pytest_torchcompile.wrappers.repeated_blocks import compile_blocks
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["in_order"]


def in_order(model: nn.Module, settings: Settings | None, cell: Cell, wrap: Callable[[Any], Any],
             in_place: bool = True) -> Callable[..., Any]:
    """What ``wrap(model)`` makes of the model, compiled in the order that the cell asks for; no ``settings``: eager.

    ``in_place``: a whole that is compiled before it is wrapped stays the module that it is, for wraps that work on its
    own parameters. Torch compiles no module of its own classes so, an ``nn.Sequential`` say; without it ``wrap`` is
    given what ``torch.compile`` returns. Raises :class:`~pytest_torchcompile.errors.UsageError` for ``inner_blocks`` of
    a model without any.
    """
    order = Wrapping.read(cell.wrapper).order
    inner: Any = model
    if settings is not None and order == "compile_then_wrap":
        if in_place:
            model.compile(**settings)
        else:
            inner = torch.compile(model, **settings)
    elif settings is not None and order == "inner_blocks":
        compile_blocks(model, settings, cell)
    wrapped = wrap(inner)
    if settings is not None and order == "wrap_then_compile":
        wrapped = torch.compile(wrapped, **settings)
    return wrapped  # type: ignore[no-any-return]
