"""ddp+checkpoint: ``DistributedDataParallel`` around a model whose repeated blocks recompute their activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers import ddp
from pytest_torchcompile.wrappers.checkpoint import checkpoint_blocks
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper

__all__ = ["DDP_CHECKPOINT"]


def _wrap(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    checkpoint_blocks(model, cell)
    return ddp.wrap(model, settings, cell, mesh)


DDP_CHECKPOINT = Wrapper("ddp+checkpoint", _wrap, ranks=2)
