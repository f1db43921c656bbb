"""Tensors that are more than strided memory (sparse, nested, quantised), as plain ones and a text about the rest."""

from __future__ import annotations

import torch

__all__ = ["dense", "layout_of"]


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The values as a strided tensor; of a nested tensor one after the other, flat. Gradients pass through."""
    if tensor.is_nested:
        parts = [part.reshape(-1) for part in tensor.unbind()]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=tensor.dtype, device=tensor.device)
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def layout_of(tensor: torch.Tensor) -> str:
    """What :func:`dense` leaves out: kind, and for nested tensors all sizes. Equal texts mean equal layouts."""
    if tensor.is_nested:
        return f"nested, {tensor.layout}, of {[tuple(part.shape) for part in tensor.unbind()]}"
    if tensor.is_quantized:
        return f"quantised, {tensor.qscheme()}"
    return str(tensor.layout)
