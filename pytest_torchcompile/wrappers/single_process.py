"""Wrappers of one process.

``none``
    the model itself, compiled whole.
``autocast``
    the compiled model is called under ``torch.autocast``, as mixed precision does: to bfloat16, or as
    ``autocast@float16`` to float16.
``checkpoint``
    activation checkpointing of each repeated block, inside of the compiled model.
``regional``
    each repeated block is compiled by itself, and the module around them stays eager. Blocks of one class share their
    compiled code, so that a deep model compiles as fast as a shallow one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper, compile_blocks, repeated_blocks, shipped_wrapper
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["AUTOCAST", "CHECKPOINT", "NONE", "REGIONAL", "checkpoint_blocks"]


def _compile_whole(model: nn.Module, settings: Settings | None, cell: Cell) -> Callable[..., Any]:
    """The model, or its eager twin where there are no settings."""
    return model if settings is None else torch.compile(model, **settings)


def _wrap_in_autocast(model: nn.Module, settings: Settings | None, cell: Cell) -> Callable[..., Any]:
    call = _compile_whole(model, settings, cell)
    device = torch.device(cell.device).type
    dtype: torch.dtype = getattr(torch, Wrapping.read(cell.wrapper).dtype)

    def autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            return call(*args, **kwargs)

    return autocast


def _wrap_checkpointed(model: nn.Module, settings: Settings | None, cell: Cell) -> Callable[..., Any]:
    checkpoint_blocks(model, cell)
    return _compile_whole(model, settings, cell)


def checkpoint_blocks(model: nn.Module, cell: Cell) -> None:
    """Have each repeated block recompute in backward what it computed in forward."""
    for block in repeated_blocks(model, cell):
        # The forward is replaced, and not the block: so parameters keep their names.
        block.forward = _checkpoint_forward(block.forward)


def _checkpoint_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recompute(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recompute


def _compile_regions(model: nn.Module, settings: Settings | None, cell: Cell) -> Callable[..., Any]:
    # For the eager twin too: a model without blocks has no such cell.
    repeated_blocks(model, cell)
    if settings is not None:
        compile_blocks(model, settings, cell)
    return model


NONE: Wrapper = shipped_wrapper("none", _compile_whole)
AUTOCAST: Wrapper = shipped_wrapper("autocast", _wrap_in_autocast)
CHECKPOINT: Wrapper = shipped_wrapper("checkpoint", _wrap_checkpointed)
REGIONAL: Wrapper = shipped_wrapper("regional", _compile_regions, partial=True)
