"""What a recorded step says: numbers at all, and more than zeros."""

from __future__ import annotations

import torch

from pytest_torchcompile.oracle import Recording
from pytest_torchcompile.oracle.recording import speaks

__all__ = ["finite", "said", "usable"]


def usable(seen: Recording) -> bool:
    """Whether loss and gradients are numbers."""
    found = [seen.loss, *seen.gradients.values()]
    return all(tensor is None or finite(tensor) for tensor in found)


def finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    plain = tensor.detach()
    return bool((plain.to_dense() if plain.layout is not torch.strided else plain).isfinite().all())


def said(seen: Recording) -> bool:
    """Whether an output or a gradient is more than zeros."""
    return _says_something(seen) or any(g is not None and speaks(g) for g in seen.gradients.values())


def _says_something(seen: Recording) -> bool:
    """A zero among whole numbers, or False, is an answer like any other; floating zeros may just be memory."""
    values = [item.value for item in seen.outputs.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        return any(values)
    whole = (t for t in tensors if not (t.is_floating_point() or t.is_complex()))
    return not seen.all_zero or any(tensor.numel() for tensor in whole)
