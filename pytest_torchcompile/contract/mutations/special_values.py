"""special_values: zeros of both signs, NaN, infinity and denormal numbers among the inputs."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def special_values(tensors: list[torch.Tensor], choice: str) -> None:
    """``nan 0``: the first element of tensor 0 is NaN; zeros and denormal numbers fill the whole tensor."""
    kind, place = choice.split()
    tensor = tensors[int(place)]
    changed = tensor.detach().clone()
    if kind in ("zero", "negative_zero"):
        changed.fill_(0.0 if kind == "zero" else -0.0)
    elif kind == "denormal":
        changed.mul_(torch.finfo(changed.dtype).tiny / 4)
    elif changed.numel():
        changed[(0,) * changed.ndim] = float(kind)
    tensors[int(place)] = changed.requires_grad_(tensor.requires_grad)


def _choices(module: Any, batch: Any) -> list[str]:
    kinds = ("zero", "negative_zero", "denormal", "nan", "inf")
    floating = [place for place, tensor in enumerate(batch.tensors()) if tensor.is_floating_point()]
    return [f"{kind} {place}" for kind in kinds for place in floating]


MUTATION = Mutation("special_values", "zeros, NaN, infinity, denormal numbers", "inputs", _choices, special_values)
