"""The compile order: a model is compiled whole before it is wrapped, after it, or block by block inside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.layer.selective import inner_blocks
from pytest_torchcompile.wrappers.protocol import Settings
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["compile_blocks", "in_order", "repeated_blocks"]


def in_order(model: nn.Module, settings: Settings | None, cell: Cell, wrap: Callable[[Any], Any],
             in_place: bool = True) -> Callable[..., Any]:
    """What ``wrap(model)`` makes of the model, compiled in the order that the cell asks for; no ``settings``: eager.

    ``in_place``: a whole that is compiled before it is wrapped stays the module that it is, for wraps that work on its
    own parameters. Torch compiles no module of its own classes so, an ``nn.Sequential`` say; without it ``wrap`` is
    given what ``torch.compile`` returns. Raises :class:`~pytest_torchcompile.errors.UsageError` for ``inner_blocks`` of
    a model without any.
    """
    if settings is None:
        return wrap(model)  # type: ignore[no-any-return]
    order = Wrapping.read(cell.wrapper).order
    inner: Any = model
    if order == "inner_blocks":
        compile_blocks(model, settings, cell)
    elif order == "compile_then_wrap" and in_place:
        model.compile(**settings)
    elif order == "compile_then_wrap":
        inner = torch.compile(model, **settings)
    wrapped = wrap(inner)
    if order == "wrap_then_compile":
        wrapped = torch.compile(wrapped, **settings)
    return wrapped  # type: ignore[no-any-return]


def repeated_blocks(model: nn.Module, cell: Cell) -> list[nn.Module]:
    """Return the direct children of the model's outermost ``nn.ModuleList``\\ s, each once.

    Raises :class:`UsageError` with the rule to paste if the model has none.
    """
    blocks = list(inner_blocks(model))
    if not blocks:
        raise UsageError(
            f"wrapper {cell.wrapper!r} works on the children of an nn.ModuleList, and model {cell.model!r} "
            "has none; leave it out with a rule:\n"
            f"  - exclude: {{model: {cell.model}, wrapper: {cell.wrapper}}}\n"
            "    reason: the model has no repeated blocks"
        )
    return blocks


def compile_blocks(model: nn.Module, settings: dict[str, Any], cell: Cell) -> None:
    """Compile each repeated block in place; blocks of one class share their compiled code."""
    for block in repeated_blocks(model, cell):
        block.compile(**settings)
