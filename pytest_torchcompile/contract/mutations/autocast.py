"""autocast: the forward runs under autocast, as mixed precision does."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def autocast(choice: str, device: str) -> Any:
    """``bfloat16`` or ``float16``."""
    return torch.autocast(device, dtype=getattr(torch, choice))


def _choices(module: Any, batch: Any) -> list[str]:
    if any(parameter.dtype != torch.float32 for parameter in module.parameters()):
        return []
    return ["bfloat16", "float16"]


MUTATION = Mutation("autocast", "autocast around the forward", "around", _choices, autocast)
