"""requires_grad: an input wants a gradient, or none although the author's does."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def requires_grad(tensors: list[torch.Tensor], choice: str) -> None:
    """``flipped 0``: tensor 0 wants a gradient where it did not, and none where it did."""
    place = int(choice.split()[1])
    tensors[place] = tensors[place].detach().requires_grad_(not tensors[place].requires_grad)


def _choices(module: Any, batch: Any) -> list[str]:
    floating = (place for place, tensor in enumerate(batch.tensors()) if tensor.is_floating_point())
    return [f"flipped {place}" for place in floating]


MUTATION = Mutation("requires_grad", "inputs that want a gradient, or none", "inputs", _choices, requires_grad)
