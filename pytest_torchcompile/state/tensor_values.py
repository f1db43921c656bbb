"""What a tensor holds, in whatever form: sparse, nested, quantised, spread over ranks; compared bit by bit.

Reading the whole of a tensor that is spread over ranks (``DTensor``) is collective: every rank has to ask for the same
tensors in the same order.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["dense_form", "fingerprint", "is_spread", "layout_of", "same_bits", "visible_strides", "whole_value",
           "write_whole"]


def dense_form(tensor: torch.Tensor) -> torch.Tensor:
    """The values as a strided tensor; of a nested tensor one after the other, flat. Gradients pass through."""
    if tensor.is_nested:
        parts = [part.reshape(-1) for part in tensor.unbind()]
        if not parts:
            return torch.zeros(0, dtype=tensor.dtype, device=tensor.device)
        return torch.cat(parts)
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.layout is torch.strided:
        return tensor
    return tensor.to_dense()


def layout_of(tensor: torch.Tensor) -> str:
    """What :func:`dense_form` leaves out: kind, and for nested tensors all sizes. Equal texts mean equal layouts."""
    if tensor.is_nested:
        return f"nested, {tensor.layout}, of {[tuple(part.shape) for part in tensor.unbind()]}"
    if tensor.is_quantized:
        return f"quantised, {tensor.qscheme()}"
    return str(tensor.layout)


def visible_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides of the axes longer than one; ``None`` where the layout has none or the tensor is empty."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return None
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether a rank holds only a part of the tensor."""
    return callable(getattr(tensor, "full_tensor", None))


def whole_value(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, detached: gathered from the ranks, or the tensor itself."""
    detached: Any = tensor.detach()
    if is_spread(detached):
        return detached.full_tensor()  # type: ignore[no-any-return]
    return detached  # type: ignore[no-any-return]


def write_whole(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write a whole value, the same on every rank, in place; each rank keeps its part of it."""
    if is_spread(tensor):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        tensor.copy_(distribute_tensor(value, mesh, placements, src_data_rank=None))
    else:
        tensor.copy_(value)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and all values agree; NaN equals NaN, and 0.0 equals -0.0."""
    if one.dtype != other.dtype or one.device != other.device or layout_of(one) != layout_of(other):
        return False
    one, other = dense_form(one), dense_form(other)
    if one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    # torch has no comparison of 8-bit floats
    if one.dtype.itemsize == 1:
        one, other = one.float(), other.float()
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def fingerprint(tensor: torch.Tensor) -> str:
    """A text that changes when the values do, in all likelihood; to be compared with an earlier one."""
    strided = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not strided or tensor.numel() == 0 or tensor.device.type == "meta":
        return ""
    flat = tensor.detach()
    # A sum in half precision would not notice the change of one element.
    sum_dtype = torch.float32 if flat.is_floating_point() and flat.dtype.itemsize < 4 else None
    flat = flat.reshape(-1)
    # several sums, so that elements that have changed places are noticed too
    return repr([flat[::step].sum(dtype=sum_dtype).item() for step in (1, 2, 7)])
