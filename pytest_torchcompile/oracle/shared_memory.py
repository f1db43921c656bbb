"""Which outputs share memory with inputs, parameters, buffers or each other; which strides can be seen."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["alias_pairs", "visible_strides"]


def alias_pairs(
    outputs: Iterable[tuple[str, torch.Tensor]], others: Iterable[tuple[str, torch.Tensor]]
) -> frozenset[tuple[str, str]]:
    """Pairs ``(output, other name)`` that share elements: a write to one is seen in the other.

    An output is paired with the first of the others that it overlaps, and with the first output before it. Two parts
    of one allocation that have no element in common are none. Empty tensors have no memory to share.
    """
    owners: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in others:
        if address := _address(tensor):
            owners.setdefault(address, []).append((name, tensor))
    pairs = set()
    before: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in outputs:
        address = _address(tensor)
        if not address:
            continue
        for candidates in (owners.get(address, ()), before.get(address, ())):
            if (other := _first_overlapping(tensor, candidates)) is not None:
                pairs.add((name, other))
        before.setdefault(address, []).append((name, tensor))
    return frozenset(pairs)


def _first_overlapping(tensor: torch.Tensor, candidates: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    return next((name for name, other in candidates if _overlap(tensor, other)), None)


_LARGEST = 1 << 24
"""Bytes of memory up to which it is looked at element by element; beyond that two interleaved tensors share it."""


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have a byte in common."""
    (start, end), (low, high) = _span(one), _span(other)
    if start >= high or low >= end:
        return False
    first, size = min(start, low), max(end, high) - min(start, low)
    if size > _LARGEST:
        return True
    taken = torch.zeros(size, dtype=torch.bool)
    _bytes_of(one, taken, first).fill_(True)
    return bool(_bytes_of(other, taken, first).any())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after the last."""
    start = tensor.storage_offset()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(start * tensor.itemsize), int((start + last + 1) * tensor.itemsize)


def _bytes_of(tensor: torch.Tensor, memory: torch.Tensor, first: int) -> torch.Tensor:
    """The bytes of a tensor in a map of the memory that begins with the byte ``first``."""
    strides = [stride * tensor.itemsize for stride in tensor.stride()]
    # a stride of 0 reads the same bytes again, and torch refuses to write to such a view
    sizes = [size if stride else 1 for size, stride in zip(tensor.shape, strides, strict=True)]
    offset = tensor.storage_offset() * tensor.itemsize - first
    return memory.as_strided((*sizes, tensor.itemsize), (*strides, 1), offset)


def visible_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides of the axes longer than one; ``None`` where the layout has none or the tensor is empty."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return None
    return tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)


def _address(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel() or tensor.device.type == "meta":
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # subclasses without a storage of their own
        return 0
