"""empty_batch: a batch without rows, as the last one of a filtered data set may be."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def empty_batch(tensors: list[torch.Tensor], choice: str) -> None:
    """``rows 0``: every tensor with as many rows as tensor 0 has has none."""
    rows = tensors[int(choice.split()[1])].shape[0]
    for place, tensor in enumerate(tensors):
        if tensor.ndim and tensor.shape[0] == rows:
            tensors[place] = tensor.detach()[:0].clone().requires_grad_(tensor.requires_grad)


def _choices(module: Any, batch: Any) -> list[str]:
    return [f"rows {place}" for place, tensor in enumerate(batch.tensors()) if tensor.ndim][:1]


MUTATION = Mutation("empty_batch", "a batch without rows", "inputs", _choices, empty_batch)
