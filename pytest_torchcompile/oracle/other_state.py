"""Other values for what is no parameter and no floating buffer: ids, positions, masks, and tensors in attributes.

Numbers with a fraction shrink a little, as parameters do (``calls.py``). The others do not take that: their elements
change places, so that each is as valid as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import torch

from pytest_torchcompile.oracle.calls import REFUSED, shrink_values
from pytest_torchcompile.state.tensor_forms import is_plain, same_bits
from pytest_torchcompile.state.value_leaves import attribute_tensors

__all__ = ["movable_tensors", "move_tensors"]


def movable_tensors(module: torch.nn.Module) -> dict[str, bool]:
    """What ``vary_parameters`` leaves as it is, by name, and whether :func:`move_tensors` has other values for it.

    These are the buffers of whole numbers and Booleans, and every tensor in an attribute.
    """
    found = {}
    for name, tensor in _tensors_left(module):
        found[name] = _is_fractional(tensor) or _in_other_places(tensor) is not None
    return found


def move_tensors(module: torch.nn.Module, names: Collection[str], seed: int) -> None:
    """Give some tensors of :func:`movable_tensors` other values, in place: always the same for one seed.

    Numbers with a fraction shrink. Other elements change places by one, along the first dimension in which that makes
    a difference; Booleans that are all alike are turned over, and equal numbers above one are made smaller by one.
    """
    fractional = []
    for name, tensor in _tensors_left(module):
        if name not in names:
            continue
        if _is_fractional(tensor):
            fractional.append(tensor)
            continue
        value = _in_other_places(tensor)
        if value is not None:
            with torch.no_grad(), contextlib.suppress(*REFUSED):
                tensor.copy_(value)
    shrink_values(fractional, seed, filled=set())


def _tensors_left(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers of whole numbers and Booleans, then tensors in attributes that share no memory with the others."""
    registered = {_memory_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for name, buffer in module.named_buffers():
        if _is_simple(buffer) and not _is_fractional(buffer):
            yield f"buffer {name}", buffer
    for name, tensor in attribute_tensors(module):
        # Of a result that a module has kept nobody knows what it belongs to.
        if _is_simple(tensor) and tensor.grad_fn is None and _memory_of(tensor) not in registered:
            yield f"attribute {name}", tensor


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether its elements are values in memory of its own."""
    return is_plain(tensor) and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def _memory_of(tensor: torch.Tensor) -> int:
    if not is_plain(tensor):
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _is_fractional(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _in_other_places(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value with its elements in other places; of equal elements another valid value, or None."""
    value = tensor.detach()
    for dim in range(value.ndim):
        rolled = value.roll(1, dim)
        if not same_bits(rolled, value):
            return rolled
    if not value.numel():
        return None
    if value.dtype == torch.bool:
        return ~value
    # Never larger, and not below one: an id outside of its table ends a process on a GPU.
    if bool((value > 1).all()):
        return value - 1
    return None
