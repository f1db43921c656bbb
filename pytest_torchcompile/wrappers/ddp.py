"""ddp: ``DistributedDataParallel``. Every rank has the whole model and a batch of its own; gradients are averaged."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers.order import in_order
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper

__all__ = ["DDP", "wrap"]


def wrap(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    """Wrap the model in the order that the cell asks for.

    Buffers are not broadcast: each replica's statistics are those of its own batches, as one process computes them.
    """
    from torch.nn.parallel import DistributedDataParallel

    def wrapped(inner: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for it, which 2.8 lacks
            return DistributedDataParallel(inner, process_group=mesh.get_group(), broadcast_buffers=False)

    return in_order(model, settings, cell, wrapped, in_place=False)


DDP = Wrapper("ddp", wrap, ranks=2)
