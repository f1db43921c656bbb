"""What a tensor holds, in whatever form: sparse, nested, quantised, spread over ranks; compared bit by bit.

Reading the whole of a tensor that is spread over ranks (``DTensor``) is collective: every rank has to ask for the same
tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = [
    "COMPRESSED", "computable", "dense_form", "distinct_numbers", "fingerprint", "is_plain", "is_spread", "layout_of",
    "own_part", "same_bits", "stored_numbers", "stored_parts", "subclass_of", "true_on_any_rank", "visible_strides",
    "whole_value", "write_whole",
]

COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
"""Layouts of tensors that are sparse by rows or by columns."""


def computable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; 8-bit floats as float32, which holds all of them: torch has next to no arithmetic of theirs."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor


def dense_form(tensor: torch.Tensor) -> torch.Tensor:
    """The values as a strided tensor; of a nested tensor one after the other, flat. Gradients pass through."""
    if tensor.is_nested:
        # Nested tensors have few operators of their own; both kinds of them have unbind.
        parts = [part.reshape(-1) for part in tensor.unbind()]
        if not parts:
            return torch.zeros(0, dtype=tensor.dtype, device=tensor.device)
        return torch.cat(parts)
    if tensor.is_quantized:
        return tensor.dequantize()
    if type(tensor).__name__ == "MaskedTensor":  # of torch.masked; what is masked out has no value
        return tensor.to_tensor(0)  # type: ignore[no-any-return, attr-defined]
    if tensor.layout is torch.strided:
        return tensor
    if tensor.layout is torch.sparse_coo and tensor.is_floating_point() and tensor.dtype.itemsize < 4:
        # What has one place is added up. In half precision each sum would be rounded, by us and by no model.
        return tensor.float().to_dense().to(tensor.dtype)
    return tensor.to_dense()


def stored_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that a tensor keeps in memory: the tensor itself, or what a sparse one has beside its indices.

    It shares the tensor's memory. Of a sparse tensor only (nnz, *dense sizes), or blocks of these.
    """
    if tensor.layout is torch.sparse_coo:
        # Private, torch 2.8 to 2.15: `values` raises for what is not coalesced.
        return tensor._values()
    if tensor.layout in COMPRESSED:
        return tensor.values()
    return tensor


def stored_parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """All that a sparse tensor stores: its numbers, and where they are. None where it may store one place twice, and
    for what is not sparse."""
    if tensor.layout is torch.sparse_coo and tensor.is_coalesced():
        return [stored_numbers(tensor), tensor.indices()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [stored_numbers(tensor), tensor.crow_indices(), tensor.col_indices()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [stored_numbers(tensor), tensor.ccol_indices(), tensor.row_indices()]
    return None


def distinct_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """As :func:`stored_numbers`, to be read alone: what a sparse tensor has several times at one place is added up."""
    if tensor.layout is torch.sparse_coo:
        return stored_numbers(tensor.coalesce())
    return stored_numbers(tensor)


def layout_of(tensor: torch.Tensor) -> str:
    """What :func:`dense_form` leaves out: kind, and for nested tensors all sizes. Equal texts mean equal layouts."""
    if tensor.is_nested:
        return f"nested, {tensor.layout}, of {[tuple(part.shape) for part in tensor.unbind()]}"
    if tensor.is_quantized:
        return f"quantised, {tensor.qscheme()}"
    if type(tensor).__name__ == "MaskedTensor":
        return f"masked, {fingerprint(tensor.get_mask()).tolist()}"  # type: ignore[attr-defined]
    if tensor.layout is torch.sparse_coo and not tensor.is_coalesced():
        return f"{tensor.layout}, not coalesced"
    return str(tensor.layout)


# `AsyncCollectiveTensor` is what a collective gives until somebody waits for it (torch 2.8 to 2.15).
_CLASSES_OF_TORCH = frozenset({"Tensor", "Parameter", "Buffer", "AsyncCollectiveTensor", "FakeTensor"})


def subclass_of(tensor: torch.Tensor) -> str:
    """The name of a class of tensors that is none of torch's own plain ones; empty for those, and for what is spread.

    What a distributed tensor is on one rank says nothing of what it is in one process.
    """
    name = type(tensor).__name__
    if name in _CLASSES_OF_TORCH or is_spread(tensor):
        return ""
    return name


def visible_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides of the axes longer than one; ``None`` where the layout has none or the tensor is empty."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return None
    # The stride of an axis of length one is never used, and torch sets it as it likes.
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is torch's own kind of tensor, with memory of its own, in strides."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether a rank holds only a part of the tensor."""
    return callable(getattr(tensor, "full_tensor", None))


def whole_value(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, detached: gathered from the ranks, or the tensor itself."""
    detached: Any = tensor.detach()
    if is_spread(detached):
        return detached.full_tensor()  # type: ignore[no-any-return]
    return detached  # type: ignore[no-any-return]


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, detached: its part of one that is spread, or the tensor itself."""
    detached: Any = tensor.detach()
    if is_spread(detached):
        return detached.to_local()  # type: ignore[no-any-return]
    return detached  # type: ignore[no-any-return]


def true_on_any_rank(tensors: Mapping[str, torch.Tensor], here: Mapping[str, bool]) -> dict[str, bool]:
    """What ranks have found out about their own parts of spread tensors, as all of them have to act on it.

    ``tensors``: tensors that are spread (``DTensor``), by name. ``here``: this rank's answer to each. Returns for each
    whether any rank of its mesh said yes. Collective, as :func:`whole_value` is, but once for each dimension of a mesh
    and not once for each tensor.
    """
    by_mesh: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        by_mesh.setdefault(tensor.device_mesh, []).append(name)  # type: ignore[attr-defined]
    anywhere: dict[str, bool] = {}
    for mesh, names in by_mesh.items():
        device = own_part(tensors[names[0]]).device
        votes = torch.tensor([int(here[name]) for name in names], device=device)
        # One dimension after the other reaches every rank of the mesh.
        for dimension in range(mesh.ndim):
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, mesh.get_group(dimension))
        for name, vote in zip(names, votes.tolist(), strict=True):
            anywhere[name] = bool(vote)
    return anywhere


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
    # The dense form of a graph may be far larger than all that it stores.
    parts, others = stored_parts(one), stored_parts(other)
    if parts and others and all(map(torch.equal, parts, others)):
        return True
    one, other = dense_form(one), dense_form(other)
    if one.shape != other.shape:
        return False
    # The quickest answer, and right for nearly all: only NaN, which equals nothing, needs a second look.
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    one, other = computable(one), computable(other)
    # Without a NaN they are simply different. A sum with one is NaN, and is made in a tenth of the time.
    if not bool(one.sum().isnan()):
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers that change when the values do, in all likelihood. On the tensor's device: a GPU is not waited for."""
    numbers = stored_numbers(tensor.detach())
    if not is_plain(numbers) or numbers.numel() == 0 or numbers.device.type == "meta":
        return torch.empty(0, device="cpu")
    # A sum in half precision would not notice the change of one element.
    sum_dtype = torch.float32 if numbers.is_floating_point() and numbers.dtype.itemsize < 4 else None
    flat = numbers.reshape(-1)
    # several sums, so that elements that have changed places are noticed too
    return torch.stack([flat[::step].sum(dtype=sum_dtype) for step in (1, 2, 7)])
