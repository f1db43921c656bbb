"""checkpoint: activation checkpointing of each repeated block, inside the compiled model.

Each block's ``forward`` is replaced, not the block: parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper
from pytest_torchcompile.wrappers.repeated_blocks import repeated_blocks

__all__ = ["CHECKPOINT", "checkpoint_blocks"]


def _wrap(model: nn.Module, settings: Settings | None, cell: Cell) -> Callable[..., Any]:
    checkpoint_blocks(model, cell)
    return model if settings is None else torch.compile(model, **settings)


def checkpoint_blocks(model: nn.Module, cell: Cell) -> None:
    """Have each repeated block recompute in backward what it computed in forward."""
    for block in repeated_blocks(model, cell):
        block.forward = _checkpointed(block.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recompute(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recompute


CHECKPOINT = Wrapper("checkpoint", _wrap)
