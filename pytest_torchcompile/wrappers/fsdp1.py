"""fsdp1: ``FullyShardedDataParallel``. Each rank keeps a part of all parameters in one flat tensor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers.order import in_order
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper

__all__ = ["FSDP1"]


def _wrap(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    """One unit for the whole model, whose parameters keep their names so.

    ``use_orig_params``: compiled code needs it, and without it torch can't give the gradients whole.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    device = torch.device(cell.device)
    return in_order(model, settings, cell, lambda inner: FullyShardedDataParallel(
        inner, process_group=mesh.get_group(), use_orig_params=True,
        device_id=device if device.type == "cpu" else torch.cuda.current_device()))


def _whole(call: Any) -> AbstractContextManager[Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel.summon_full_params(call, with_grads=True)


FSDP1 = Wrapper("fsdp1", _wrap, ranks=2, whole=_whole)
