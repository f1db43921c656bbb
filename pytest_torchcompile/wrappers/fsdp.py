"""Wrappers that shard a model: every rank keeps a part of its parameters, and has a batch of its own.

``fsdp1``
    ``FullyShardedDataParallel``: a rank's part of all parameters is one flat tensor.
``fsdp2``
    ``fully_shard`` of each repeated block and of the model. A rank keeps a part of each parameter, gathers the whole
    for a block's call, and gets its part of the averaged gradients.
``fsdp2+tp``
    a mesh of two dimensions. Pairs of ranks split the layers of one replica (:mod:`~.tp`), and the replicas shard what
    each of a pair has.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers.order import in_order, repeated_blocks
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper, shipped_wrapper
from pytest_torchcompile.wrappers.tp import split_layers

__all__ = ["FSDP1", "FSDP2", "FSDP2_TP"]


def _wrap_fsdp1(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    """One unit for the whole model, whose parameters keep their names so."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    def shard(inner: Any) -> Any:
        device: torch.device | int = torch.device(cell.device)
        if torch.device(cell.device).type != "cpu":
            device = torch.cuda.current_device()
        # use_orig_params: compiled code needs it, and without it torch can't give the gradients whole.
        return FullyShardedDataParallel(inner, process_group=mesh.get_group(), use_orig_params=True, device_id=device)

    return in_order(model, settings, cell, shard)


def _summon_whole(call: Any) -> AbstractContextManager[Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel.summon_full_params(call, with_grads=True)


def _wrap_fsdp2(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    """Shard the model over the mesh, compiled in the order that the cell asks for.

    ``wrap_then_compile`` and ``compile_then_wrap`` compile the whole model. FSDP's hooks around it are not compiled.
    Neither is, in torch up to 2.13, what of the model is outside of the blocks.
    """
    from torch.distributed.fsdp import fully_shard

    def shard(inner: nn.Module) -> nn.Module:
        # The blocks first: what a block has not sharded is the model's to shard.
        for block in repeated_blocks(inner, cell):
            fully_shard(block, mesh=mesh)
        fully_shard(inner, mesh=mesh)
        return inner

    return in_order(model, settings, cell, shard)


def _reshard_parts(model: nn.Module) -> None:
    """Shard again what a forward without a backward has left whole."""
    from torch.distributed.fsdp import FSDPModule

    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _wrap_fsdp2_tp(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    split_layers(model, cell, mesh["tensor"], eager=settings is None)
    return _wrap_fsdp2(model, settings, cell, mesh["data"])


FSDP1: Wrapper = shipped_wrapper("fsdp1", _wrap_fsdp1, whole=_summon_whole)
FSDP2: Wrapper = shipped_wrapper("fsdp2", _wrap_fsdp2, settle=_reshard_parts)
FSDP2_TP: Wrapper = shipped_wrapper("fsdp2+tp", _wrap_fsdp2_tp, settle=_reshard_parts)
