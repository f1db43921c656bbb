"""strides: the same values in memory that is transposed, has gaps, begins at an odd place, or is one row for all."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def strides(tensors: list[torch.Tensor], choice: str) -> None:
    """``transposed 0``: tensor 0 with its last two dimensions the other way round in memory."""
    kind, place = choice.split()
    tensor = tensors[int(place)].detach()
    if kind == "transposed":
        changed = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif kind == "sliced":
        changed = torch.stack([tensor, tensor], -1)[..., 0]
    elif kind == "offset":
        changed = torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].view(tensor.shape)
    else:
        changed = tensor[:1].clone().expand(tensor.shape)
    tensors[int(place)] = changed.requires_grad_(tensors[int(place)].requires_grad)


def _choices(module: Any, batch: Any) -> list[str]:
    offered = []
    for place, tensor in enumerate(batch.tensors()):
        kinds = ["sliced", "offset"]
        if tensor.ndim >= 2:
            kinds = ["transposed", "sliced", "offset", "expanded"]
        offered += [f"{kind} {place}" for kind in kinds]
    return offered


MUTATION = Mutation("strides", "transposed, with gaps, at an offset, or expanded", "inputs", _choices, strides)
