"""Data parallel wrappers: every rank has a batch of its own, and gradients are averaged.

``ddp``
    ``DistributedDataParallel``: every rank has the whole model.
``ddp+checkpoint``
    the same, and the model's repeated blocks recompute their activations.
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

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.oracle.spread import Spread
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper, in_order, repeated_blocks, shipped_wrapper
from pytest_torchcompile.wrappers.single_process import checkpoint_blocks
from pytest_torchcompile.wrappers.tp import split_layers
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["DDP", "DDP_CHECKPOINT", "FSDP1", "FSDP2", "FSDP2_TP", "FlatShards"]

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


class FlatShards(Spread):
    """A rank has a part of one flat tensor, and the parameters are views of that."""

    def whole(self) -> AbstractContextManager[Any]:
        """All parameters and gradients, gathered from the ranks."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel.summon_full_params(self.call, with_grads=True)  # type: ignore[arg-type]


def _wrap_fsdp2(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    """Shard the model over the mesh, compiled in the order that the cell asks for.

    ``wrap_then_compile`` and ``compile_then_wrap`` compile the whole model. FSDP's hooks around it are not compiled.
    Neither is, in torch up to 2.13, what of the model is outside of the blocks. Raises :class:`UsageError` for the
    toolkit around a whole model, which no graph can hold.
    """
    from torch.distributed.fsdp import fully_shard

    order = Wrapping.read(cell.wrapper).order
    if settings is not None and cell.backend == "toolkit" and order != "inner_blocks":
        # _dynamo_disable in torch/distributed/fsdp/_fully_shard/_fsdp_common.py, torch 2.13.
        raise UsageError(f"{cell.id}: the toolkit takes the whole model as one graph, and of wrapper {cell.wrapper!r} "
                         "there is none: torch keeps FSDP2's hooks from Dynamo (_dynamo_disable in "
                         "torch/distributed/fsdp/_fully_shard/_fsdp_common.py); wrapper simple_fsdp has the same "
                         "collectives in the graph, and with order inner_blocks each block is a graph of its own")

    def shard(inner: nn.Module) -> nn.Module:
        # The blocks first: what a block has not sharded is the model's to shard.
        for block in repeated_blocks(inner, cell):
            fully_shard(block, mesh=mesh)
        fully_shard(inner, mesh=mesh)
        return inner

    return in_order(model, settings, cell, shard)


class _Shards(Spread):
    """A rank has a part of each parameter, which is a ``DTensor``."""

    def settle(self) -> None:
        """Shard again what a forward without a backward has left whole."""
        from torch.distributed.fsdp import FSDPModule

        for part in self.model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _wrap_fsdp2_tp(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    split_layers(model, cell, mesh["tensor"], eager=settings is None)
    return _wrap_fsdp2(model, settings, cell, mesh["data"])


DDP: Wrapper = shipped_wrapper("ddp", _wrap_replica)
DDP_CHECKPOINT: Wrapper = shipped_wrapper("ddp+checkpoint", _wrap_checkpointed_replica)
FSDP1: Wrapper = shipped_wrapper("fsdp1", _wrap_fsdp1, spread=FlatShards)
FSDP2: Wrapper = shipped_wrapper("fsdp2", _wrap_fsdp2, spread=_Shards)
FSDP2_TP: Wrapper = shipped_wrapper("fsdp2+tp", _wrap_fsdp2_tp, spread=_Shards)
