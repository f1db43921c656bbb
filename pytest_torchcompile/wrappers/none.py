"""none: the model itself, compiled whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper

__all__ = ["NONE"]


def _wrap(model: nn.Module, settings: Settings | None, cell: Cell) -> Callable[..., Any]:
    return model if settings is None else torch.compile(model, **settings)


NONE = Wrapper("none", _wrap)
