"""fsdp2: ``fully_shard`` of each repeated block and of the model. Every rank keeps a part of each parameter, gathers
the whole for a block's call, and gets its part of the averaged gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers.order import in_order
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper
from pytest_torchcompile.wrappers.repeated_blocks import repeated_blocks

__all__ = ["FSDP2", "gather_back", "wrap"]


def wrap(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    """Shard the model over the mesh, compiled in the order that the cell asks for.

    ``wrap_then_compile`` and ``compile_then_wrap`` compile the whole model; FSDP's hooks around it are not compiled,
    and neither is, in torch up to 2.13, what of the model is outside of the blocks.
    """
    from torch.distributed.fsdp import fully_shard

    def sharded(inner: nn.Module) -> nn.Module:
        for block in repeated_blocks(inner, cell):
            fully_shard(block, mesh=mesh)
        fully_shard(inner, mesh=mesh)
        return inner

    return in_order(model, settings, cell, sharded)


def gather_back(model: nn.Module) -> None:
    """Shard again what a forward without a backward has left whole."""
    from torch.distributed.fsdp import FSDPModule

    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


FSDP2 = Wrapper("fsdp2", wrap, ranks=2, settle=gather_back)
