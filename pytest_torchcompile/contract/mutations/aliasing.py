"""aliasing: two inputs are one tensor, or neighbours in one memory."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def aliasing(tensors: list[torch.Tensor], choice: str) -> None:
    """``same 0 1``: tensor 0 in the place of tensor 1 too. ``views 0 1``: both are views of one base."""
    kind, first, second = choice.split()
    one, other = tensors[int(first)], tensors[int(second)]
    if kind == "same":
        tensors[int(second)] = one
    else:
        base = torch.cat([one.detach().reshape(-1), other.detach().reshape(-1)])
        tensors[int(first)] = base[: one.numel()].view(one.shape)
        tensors[int(second)] = base[one.numel():].view(other.shape)


def _choices(module: Any, batch: Any) -> list[str]:
    offered = []
    for (first, one), (second, other) in combinations(enumerate(batch.tensors()), 2):
        if one.dtype != other.dtype:
            continue
        if one.shape == other.shape:
            offered.append(f"same {first} {second}")
        offered.append(f"views {first} {second}")
    return offered


MUTATION = Mutation("aliasing", "two inputs that share memory", "inputs", _choices, aliasing)
