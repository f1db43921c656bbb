"""memory_format: images and volumes with their channels last in memory."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def memory_format(tensors: list[torch.Tensor], choice: str) -> None:
    """``channels_last 0``: tensor 0 with its channels last."""
    place = int(choice.split()[1])
    tensor = tensors[place]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = tensor.requires_grad
    tensors[place] = tensor.detach().contiguous(memory_format=formats[tensor.ndim]).requires_grad_(wanted)


def _choices(module: Any, batch: Any) -> list[str]:
    return [f"channels_last {place}" for place, tensor in enumerate(batch.tensors()) if tensor.ndim in (4, 5)]


MUTATION = Mutation("memory_format", "channels last in memory", "inputs", _choices, memory_format)
