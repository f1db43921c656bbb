"""Batch items: how many tokens or samples a batch has, for items a second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.layer.padding import is_ids

__all__ = ["Items", "count_items"]

_WHOLE_NUMBERS: Final = frozenset({torch.int32, torch.int64})


@dataclass(frozen=True)
class Items:
    """How many of what a batch has."""

    count: int
    unit: str = "items"
    """``tokens`` or ``items``."""


def count_items(batch: Batch) -> Items:
    """The tokens of all token ids, padding included; without ids the size of the first tensor's first dimension.

    Token ids are two-dimensional whole numbers: those that a name calls so (``input_ids``, ``decoder_input_ids``), or
    the first tensor of the batch.
    """
    ids = list(_named_ids(batch))
    first = next((tensor for tensor in batch.tensors() if tensor.ndim), None)
    if not ids and first is not None and _may_be_ids(first):
        ids = [first]
    if ids:
        return Items(sum(tensor.numel() for tensor in ids), "tokens")
    if first is None:
        return Items(1)
    return Items(first.shape[0])


def _named_ids(batch: Batch) -> Iterator[torch.Tensor]:
    # Models of a library often take one dict instead of keyword arguments.
    for named in (batch.kwargs, *batch.args):
        if not isinstance(named, dict):
            continue
        for name, value in named.items():
            if isinstance(value, torch.Tensor) and is_ids(str(name)) and _may_be_ids(value):
                yield value


def _may_be_ids(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and tensor.dtype in _WHOLE_NUMBERS
