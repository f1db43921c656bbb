"""Bitwise questions about tensors, answered in pieces."""

from __future__ import annotations

import torch

from pytest_torchcompile.state.layouts import dense, layout_of

__all__ = ["fingerprint", "same_bits"]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and all values agree; NaN equals NaN, and 0.0 equals -0.0."""
    if one.dtype != other.dtype or one.device != other.device or layout_of(one) != layout_of(other):
        return False
    one, other = dense(one), dense(other)
    if one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    if one.dtype.itemsize == 1:  # torch has no comparison of 8-bit floats
        one, other = one.float(), other.float()
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def fingerprint(tensor: torch.Tensor) -> str:
    """A text that changes when the values do, in all likelihood; to be compared with an earlier one."""
    strided = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not strided or tensor.numel() == 0 or tensor.device.type == "meta":
        return ""
    flat = tensor.detach()
    half = flat.is_floating_point() and flat.dtype.itemsize < 4
    flat = flat.reshape(-1)
    # several sums, so that elements that have changed places are noticed too
    return repr([flat[::step].sum(dtype=torch.float32 if half else None).item() for step in (1, 2, 7)])
