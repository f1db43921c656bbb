"""What a tensor of a batch is padded with, judged by its name, and along which of its dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from pytest_torchcompile.layer.config import BucketConfig

__all__ = ["LABEL", "SIDES", "Padding", "is_ids", "is_mask"]

LABEL: Final = -100
"""What torch's cross entropy ignores (``ignore_index``)."""
SIDES: Final = ("right", "left")

Value = int | float | bool


@dataclass(frozen=True)
class Padding:
    """How tensors become as long as a bucket."""

    config: BucketConfig
    side: str = "right"
    values: Mapping[str, Value | None] = field(default_factory=dict)
    """Pad values by name; None: that tensor stays as it is. They come before what a name says by itself."""

    def pad(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor, as long as the bucket of its length; itself if it is that long already, or none of ours.

        Raises :class:`ValueError`, naming the tensor, for one that has other dimensions or cannot hold the value.
        """
        asked = name in self.values
        value = self.values[name] if asked else _value(name.lower(), self.config)
        if value is None or (value == LABEL and tensor.ndim == 1 and not asked):
            return tensor
        if tensor.ndim > 2 and is_mask(name) and not asked:
            return self._pad_attention(name, tensor)
        if tensor.ndim != 2 and not (asked and tensor.ndim > 2):
            expected = "(batch, length)" if not asked else "(batch, length, ...)"
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; expected {expected}")
        _check_dtype(name, tensor, value, asked)
        return self._longer(tensor, 1, self.config.bucket(tensor.shape[1], name), value)

    def cut(self, tensor: Tensor, dim: int, length: int) -> Tensor:
        """A view of the part of ``tensor`` that is no padding."""
        return tensor.narrow(dim, 0 if self.side == "right" else tensor.shape[dim] - length, length)

    def _longer(self, tensor: Tensor, dim: int, size: int, value: Value) -> Tensor:
        missing = size - tensor.shape[dim]
        if not missing:
            return tensor
        ends = (0, missing) if self.side == "right" else (missing, 0)
        return functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim % tensor.ndim) + ends, value=value)

    def _pad_attention(self, name: str, mask: Tensor) -> Tensor:
        """(..., queries, keys): added keys are hidden from all; added queries see the real keys.

        (A query that sees nothing is NaN after softmax.) Queries of size 1 are broadcast, and stay.
        """
        seen, hidden = _seen_and_hidden(mask)
        queries, keys = mask.shape[-2:]
        if queries != 1:
            mask = self._longer(mask, mask.ndim - 2, self.config.bucket(queries, f"{name} (its queries)"), seen)
        return self._longer(mask, mask.ndim - 1, self.config.bucket(keys, f"{name} (its keys)"), hidden)


def is_ids(name: str) -> bool:
    """Whether tensors of that name are token ids."""
    low = name.lower()
    return not low.endswith(("type_ids", "position_ids")) and (low in ("ids", "tokens") or low.endswith("_ids"))


def is_mask(name: str) -> bool:
    """Whether tensors of that name are masks."""
    return name.lower().endswith("mask")


_KINDS: Final[tuple[tuple[Callable[[str], bool], Callable[[BucketConfig], int]], ...]] = (
    (is_mask, lambda config: 0),
    (lambda name: name.endswith(("label", "labels", "target", "targets")), lambda config: LABEL),
    (lambda name: name.endswith(("type_ids", "position_ids")), lambda config: 0),
    (is_ids, lambda config: config.pad_token_id),
)
"""Whether a name is of that kind, and what tensors of the kind are padded with."""


def _value(name: str, config: BucketConfig) -> int | None:
    return next((value(config) for fits, value in _KINDS if fits(name)), None)


def _seen_and_hidden(mask: Tensor) -> tuple[Value, Value]:
    """What an attention mask says of a key that is attended to, and of one that is not.

    A floating mask is added to the scores (``scaled_dot_product_attention``), unless it holds ones and zeros alone.
    """
    if not mask.is_floating_point():
        return 1, 0
    if bool(((mask == 0) | (mask == 1)).all()) and bool((mask == 1).any()):
        return 1.0, 0.0
    return 0.0, torch.finfo(mask.dtype).min


def _check_dtype(name: str, tensor: Tensor, value: Value, asked: bool) -> None:
    if tensor.is_floating_point() and (asked or value == 0):  # asked for, or a mask of weights
        return
    if tensor.dtype is torch.bool:
        low, high = 0, 1
    elif tensor.is_floating_point() or tensor.is_complex():
        raise ValueError(f"{name} is {tensor.dtype}; expected whole numbers")
    else:
        limits = torch.iinfo(tensor.dtype)
        low, high = limits.min, limits.max
    if not low <= value <= high or value != int(value):
        raise ValueError(f"{name} is {tensor.dtype}, which cannot hold {value}, the value it is padded with")
