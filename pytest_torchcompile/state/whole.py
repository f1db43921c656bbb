"""Whole values of tensors that are spread over ranks (``DTensor``), and how to write them back.

Reading is collective: every rank has to ask for the same tensors in the same order.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["put", "spread", "whole"]


def spread(tensor: torch.Tensor) -> bool:
    """Whether a rank holds only a part of the tensor."""
    return callable(getattr(tensor, "full_tensor", None))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, detached: gathered from the ranks, or the tensor itself."""
    plain: Any = tensor.detach()
    return plain.full_tensor() if spread(plain) else plain  # type: ignore[no-any-return]


def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write a whole value, the same on every rank, in place; each rank keeps its part of it."""
    if spread(tensor):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        tensor.copy_(distribute_tensor(value, mesh, placements, src_data_rank=None))
    else:
        tensor.copy_(value)
