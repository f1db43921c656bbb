"""autocast: the compiled model is called under ``torch.autocast`` to bfloat16, as mixed precision does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper

__all__ = ["AUTOCAST"]


def _wrap(model: nn.Module, settings: Settings | None, cell: Cell) -> Callable[..., Any]:
    call = model if settings is None else torch.compile(model, **settings)
    device = torch.device(cell.device).type

    def autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            return call(*args, **kwargs)

    return autocast


AUTOCAST = Wrapper("autocast", _wrap, unit="bfloat16")
