"""special_values: zeros of both signs, NaN, infinity, denormal and largest numbers among the inputs."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def special_values(tensors: list[torch.Tensor], choice: str) -> None:
    """``nan 0``: the first element of tensor 0 is NaN; zeros and denormal numbers fill the whole tensor.

    ``mixed 0`` writes a row of edges over all of it: what a vectorised loop does to them is not what its rest does.
    """
    kind, place = choice.split()
    changed = tensors[int(place)].detach().clone()
    if kind in ("zero", "negative_zero"):
        changed.fill_(0.0 if kind == "zero" else -0.0)
    elif kind == "denormal":
        changed.mul_(torch.finfo(changed.dtype).tiny / 4)
    elif kind == "mixed":
        changed.copy_(_edges(changed.dtype, changed.numel()).view(changed.shape))
    else:
        # Of an empty one nothing.
        changed[(slice(1),) * changed.ndim] = float(kind)
    tensors[int(place)] = changed.requires_grad_(tensors[int(place)].requires_grad)


def _edges(dtype: torch.dtype, length: int) -> torch.Tensor:
    """So many numbers at which an operator changes its ways, each several times where there is room."""
    known = torch.finfo(dtype)
    edges = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 0.1, -0.1, 3.0, 20.0, -20.0, 88.0, 2.0**31, known.max,
             known.min, known.tiny, known.eps, 1 - known.eps, float("inf"), -float("inf"), float("nan")]  # fmt: skip
    row = torch.tensor(edges, dtype=torch.float64).to(dtype)
    return row.repeat(length // len(edges) + 1)[:length]


def _choices(module: Any, batch: Any) -> list[str]:
    kinds = ("zero", "negative_zero", "denormal", "nan", "inf", "mixed")
    floating = [place for place, tensor in enumerate(batch.tensors()) if tensor.is_floating_point()]
    return [f"{kind} {place}" for kind in kinds for place in floating]


MUTATION = Mutation("special_values", "zeros, NaN, infinity, denormal numbers", "inputs", _choices, special_values)
