"""Wrappers around ``DistributedDataParallel``. Every rank has the whole model and a batch of its own, and gradients are
averaged.

``ddp``
    the model in it.
``ddp+checkpoint``
    the same, and the model's repeated blocks recompute their activations.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers.order import in_order
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper, shipped_wrapper
from pytest_torchcompile.wrappers.single_process import checkpoint_blocks

__all__ = ["DDP", "DDP_CHECKPOINT"]


def _wrap_replica(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    """Wrap the model in the order that the cell asks for."""
    from torch.nn.parallel import DistributedDataParallel

    def wrap(inner: Any) -> Any:
        with warnings.catch_warnings():
            # torch 2.13 has another name for `process_group`, which 2.8 lacks.
            warnings.simplefilter("ignore", FutureWarning)
            # Each replica's statistics are those of its own batches, as one process computes them.
            return DistributedDataParallel(inner, process_group=mesh.get_group(), broadcast_buffers=False)

    return in_order(model, settings, cell, wrap, in_place=False)


def _wrap_checkpointed_replica(model: nn.Module, settings: Settings | None, cell: Cell,
                               mesh: Any) -> Callable[..., Any]:
    checkpoint_blocks(model, cell)
    return _wrap_replica(model, settings, cell, mesh)


DDP: Wrapper = shipped_wrapper("ddp", _wrap_replica)
DDP_CHECKPOINT: Wrapper = shipped_wrapper("ddp+checkpoint", _wrap_checkpointed_replica)
