"""fsdp1: ``FullyShardedDataParallel``. Each rank keeps a part of all parameters in one flat tensor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers.blocks import compile_blocks
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["FSDP1"]


def _wrap(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    """One unit for the whole model, whose parameters keep their names so.

    ``use_orig_params``: compiled code needs it, and without it torch can't give the gradients whole.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    order = Wrapping.read(cell.wrapper).order
    if settings is not None and order == "compile_then_wrap":
        model.compile(**settings)
    elif settings is not None and order == "inner_blocks":
        compile_blocks(model, settings, cell)
    device = torch.device(cell.device)
    wrapped: Any = FullyShardedDataParallel(
        model, process_group=mesh.get_group(), use_orig_params=True,
        device_id=device if device.type == "cpu" else torch.cuda.current_device())
    if settings is not None and order == "wrap_then_compile":
        return torch.compile(wrapped, **settings)
    return wrapped  # type: ignore[no-any-return]


def _whole(call: Any) -> AbstractContextManager[Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel.summon_full_params(call, with_grads=True)


FSDP1 = Wrapper("fsdp1", _wrap, ranks=2, whole=_whole)
