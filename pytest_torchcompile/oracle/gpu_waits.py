"""Calls of operators that wait for a GPU, or that can't be recorded as a CUDA graph for another reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from pytest_torchcompile.state.tensor_forms import is_plain

__all__ = ["asks_for_numbers", "is_recordable", "tensors_in"]

# Beginnings of the names of operators that wait inside, or keep something of their own: those of linear algebra ask
# whether it went well, a product of groups asks how long they are.
_NEVER: Final = (
    "linalg_", "_linalg_", "cholesky", "_cholesky", "lu_", "_cudnn_rnn", "_grouped_mm", "_scaled_grouped_mm",
)
_BY_MASK: Final = frozenset({"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"})
_COPIES: Final = frozenset({"_to_copy", "copy_", "copy"})
# Of what Python has made on a CPU.
_LIFTS: Final = frozenset({"lift", "lift_fresh", "lift_fresh_copy"})
_MASKS: Final = (torch.bool, torch.uint8)


def asks_for_numbers(func: Any, args: Sequence[Any]) -> bool:
    """Whether Python learns a number of a tensor by this call, or how many there are that something is true of.

    ``torch.Tag.data_dependent_output`` and ``dynamic_output_shape``: torch 2.8 to 2.15.
    """
    tags = getattr(func, "tags", ())
    if torch.Tag.data_dependent_output in tags:
        return True
    if torch.Tag.dynamic_output_shape not in tags:
        return False
    return func._schema.name != "aten::index" or _has_mask(args)


def is_recordable(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:
    """Whether a call can be part of a CUDA graph, as far as is known; any call can that is for a CPU alone."""
    given, made = [*tensors_in((*args, *kwargs.values()))], [*tensors_in(out)]
    if all(tensor.device.type == "cpu" for tensor in (*given, *made)):
        return True
    space, _, name = func._schema.name.partition("::")
    if space != "aten" or name.startswith(_NEVER) or name in _LIFTS or asks_for_numbers(func, args):
        return False
    if name in _BY_MASK and _has_mask(args):
        return False
    # A single number on a CPU is handed to a kernel as it is, but for one that copies it.
    devices = {tensor.device for tensor in (*given, *made) if tensor.dim() or name in _COPIES}
    return len(devices) <= 1 and all(is_plain(tensor) for tensor in given)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results, and in lists of them."""
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            for each in value:
                if isinstance(each, torch.Tensor):
                    yield each


def _has_mask(args: Sequence[Any]) -> bool:
    """Whether one of the indices, which are the second argument, chooses by true and false."""
    return any(index.dtype in _MASKS for index in tensors_in(args[1:2]))
