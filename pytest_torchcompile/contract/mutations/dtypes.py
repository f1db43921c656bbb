"""dtypes: one input in another dtype; most often eager refuses it, and then it is not judged."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def dtypes(tensors: list[torch.Tensor], choice: str) -> None:
    """``float64 0``: tensor 0 in float64."""
    dtype, place = choice.split()
    changed = tensors[int(place)].detach().to(getattr(torch, dtype))
    tensors[int(place)] = changed.requires_grad_(tensors[int(place)].requires_grad)


def _choices(module: Any, batch: Any) -> list[str]:
    offered = []
    for place, tensor in enumerate(batch.tensors()):
        if tensor.dtype is torch.float32:
            offered += [f"float64 {place}", f"bfloat16 {place}"]
        elif tensor.dtype is torch.int64:
            offered.append(f"int32 {place}")
    return offered


MUTATION = Mutation("dtypes", "an input of another dtype", "inputs", _choices, dtypes)
