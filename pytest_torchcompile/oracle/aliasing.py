"""Which outputs share memory with inputs, parameters, buffers or each other; which strides can be seen."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["alias_pairs", "visible_strides"]


def alias_pairs(
    outputs: Iterable[tuple[str, torch.Tensor]], others: Iterable[tuple[str, torch.Tensor]]
) -> frozenset[tuple[str, str]]:
    """Pairs ``(output, other name)`` of one storage; of several outputs each is paired with the first.

    Empty tensors have no memory to share and are left out.
    """
    owners: dict[int, str] = {}
    for name, tensor in others:
        address = _address(tensor)
        if address:
            owners.setdefault(address, name)
    pairs = set()
    first: dict[int, str] = {}
    for name, tensor in outputs:
        address = _address(tensor)
        if not address:
            continue
        if address in owners:
            pairs.add((name, owners[address]))
        if address in first:
            pairs.add((name, first[address]))
        first.setdefault(address, name)
    return frozenset(pairs)


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
