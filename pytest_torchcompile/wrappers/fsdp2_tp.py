"""fsdp2+tp: a mesh of two dimensions. Pairs of ranks split the layers of one replica, and the replicas shard what each
of a pair has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers import fsdp2, tp
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper

__all__ = ["FSDP2_TP"]


def _wrap(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    tp.split_layers(model, cell, mesh["tensor"], eager=settings is None)
    return fsdp2.wrap(model, settings, cell, mesh["data"])


FSDP2_TP = Wrapper("fsdp2+tp", _wrap, ranks=4, axes=("data", "tensor"), settle=fsdp2.gather_back)
