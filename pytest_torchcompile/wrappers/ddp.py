"""ddp: ``DistributedDataParallel``. Every rank has the whole model and a batch of its own; gradients are averaged."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers.blocks import compile_blocks
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["DDP", "wrap"]


def wrap(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    """Wrap the model in the order that the cell asks for.

    Buffers are not broadcast: each replica's statistics are those of its own batches, as one process computes them.
    """
    from torch.nn.parallel import DistributedDataParallel

    order = Wrapping.read(cell.wrapper).order
    inner: Any = model
    if settings is not None and order == "compile_then_wrap":
        inner = torch.compile(model, **settings)
    elif settings is not None and order == "inner_blocks":
        compile_blocks(model, settings, cell)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for it, which 2.8 lacks
        wrapped: Any = DistributedDataParallel(inner, process_group=mesh.get_group(), broadcast_buffers=False)
    if settings is not None and order == "wrap_then_compile":
        wrapped = torch.compile(wrapped, **settings)
    return wrapped  # type: ignore[no-any-return]


DDP = Wrapper("ddp", wrap, ranks=2)
