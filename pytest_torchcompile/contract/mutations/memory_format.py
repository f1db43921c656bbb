"""memory_format: images and volumes with their channels last in memory."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def memory_format(tensors: list[torch.Tensor], choice: str) -> None:
    """``channels_last 0``: tensor 0, an image, with its channels last; ``channels_last_3d 0``: a volume."""
    name, place = choice.split()
    changed = tensors[int(place)].detach().contiguous(memory_format=getattr(torch, name))
    tensors[int(place)] = changed.requires_grad_(tensors[int(place)].requires_grad)


def _choices(module: Any, batch: Any) -> list[str]:
    names = {4: "channels_last", 5: "channels_last_3d"}
    tensors = [(place, tensor) for place, tensor in enumerate(batch.tensors()) if tensor.ndim in names]
    return [f"{names[tensor.ndim]} {place}" for place, tensor in tensors]


MUTATION = Mutation("memory_format", "channels last in memory", "inputs", _choices, memory_format)
