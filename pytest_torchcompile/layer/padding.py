"""What a tensor of a batch is padded with, judged by its name, and along which of its dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from pytest_torchcompile.layer.config import BucketConfig

__all__ = ["LABEL", "SIDES", "Padding", "is_ids", "is_label", "is_mask"]

LABEL: Final = -100
"""What torch's cross entropy ignores (``ignore_index``)."""
SIDES: Final = ("right", "left")
_WITHOUT_TOKENS: Final = ("type_ids", "position_ids")
"""Ends of names of ids that are no token ids; 0 is valid there."""

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
        if name in self.values:
            return self._pad_as_asked(name, tensor, self.values[name])
        if is_mask(name):
            return self._pad_mask(name, tensor)
        value = _value_by_name(name, self.config)
        # Labels of one dimension are one for each sample.
        if value is None or (value == LABEL and tensor.ndim == 1):
            return tensor
        if tensor.ndim != 2:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; expected (batch, length)")
        if tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype}; expected whole numbers")
        return self._pad_sequences(name, tensor, value)

    def _pad_as_asked(self, name: str, tensor: Tensor, value: Value | None) -> Tensor:
        if value is None:
            return tensor
        if tensor.ndim < 2:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; expected (batch, length, ...)")
        return self._pad_sequences(name, tensor, value)

    def _pad_sequences(self, name: str, tensor: Tensor, value: Value) -> Tensor:
        _refuse_unfit(name, tensor, value)
        return self._lengthened(tensor, 1, self.config.bucket(tensor.shape[1], name), value)

    def cut(self, tensor: Tensor, dim: int, length: int) -> Tensor:
        """A view of the part of ``tensor`` that is no padding."""
        start = 0 if self.side == "right" else tensor.shape[dim] - length
        return tensor.narrow(dim, start, length)

    def _lengthened(self, tensor: Tensor, dim: int, size: int, value: Value) -> Tensor:
        missing = size - tensor.shape[dim]
        if not missing:
            return tensor
        ends = (0, missing) if self.side == "right" else (missing, 0)
        # torch counts from the last dimension, two numbers for each.
        untouched = (0, 0) * (tensor.ndim - 1 - dim % tensor.ndim)
        return functional.pad(tensor, untouched + ends, value=value)

    def _pad_mask(self, name: str, mask: Tensor) -> Tensor:
        if mask.ndim < 2 or mask.is_complex():
            raise ValueError(f"{name} has the shape {tuple(mask.shape)} and is {mask.dtype}; expected (batch, length), "
                             "or (..., queries, keys), of numbers that are not complex")
        seen, hidden = _seen_and_hidden(name, mask)
        if mask.ndim > 2:
            return self._pad_attention(name, mask, seen, hidden)
        return self._lengthened(mask, 1, self.config.bucket(mask.shape[1], name), hidden)

    def _pad_attention(self, name: str, mask: Tensor, seen: Value, hidden: Value) -> Tensor:
        """(..., queries, keys): added keys are hidden from all; added queries see the real keys.

        (A query that sees nothing is NaN after softmax.) Queries of size 1 are broadcast, and stay.
        """
        queries, keys = mask.shape[-2:]
        # Queries of size 1 stand for all of them.
        if queries != 1:
            mask = self._lengthened(mask, mask.ndim - 2, self.config.bucket(queries, f"{name} (its queries)"), seen)
        return self._lengthened(mask, mask.ndim - 1, self.config.bucket(keys, f"{name} (its keys)"), hidden)


def is_ids(name: str) -> bool:
    """Whether tensors of that name are token ids."""
    low = name.lower()
    # label_ids and position_ids end like token ids.
    if is_label(name) or low.endswith(_WITHOUT_TOKENS):
        return False
    return low in ("ids", "tokens") or low.endswith("_ids")


def is_label(name: str) -> bool:
    """Whether tensors of that name are what a loss is told to expect."""
    return name.lower().removesuffix("_ids").endswith(("label", "labels", "target", "targets"))


def is_mask(name: str) -> bool:
    """Whether tensors of that name are masks."""
    return name.lower().endswith("mask")


def _value_by_name(name: str, config: BucketConfig) -> int | None:
    """What tensors of a name are padded with; None: they are none of ours."""
    if is_label(name):
        return LABEL
    if name.lower().endswith(_WITHOUT_TOKENS):
        return 0
    if is_ids(name):
        return config.pad_token_id
    return None


def _seen_and_hidden(name: str, mask: Tensor) -> tuple[Value, Value]:
    """What a mask says of a token that is attended to, and of one that is not.

    A padding mask, as torch has them, marks what is to be ignored. A floating mask may be one that is added to the
    scores (``scaled_dot_product_attention``).
    """
    if name.lower().endswith(("padding_mask", "pad_mask")):
        return _of_padding_mask(name, mask)
    if mask.is_floating_point() and _is_added_to_scores(name, mask):
        return 0.0, torch.finfo(mask.dtype).min
    return 1, 0


def _of_padding_mask(name: str, mask: Tensor) -> tuple[Value, Value]:
    if mask.dtype is torch.bool:
        return False, True
    if not mask.is_floating_point() or bool((mask > 0).any()):
        raise ValueError(f"{name} is {mask.dtype} and does not say what it ignores; expected bool (True: ignored), or "
                         f"0 and -inf, or the value to pad with: pad_values={{{name!r}: ...}}")
    return 0.0, float("-inf")


def _is_added_to_scores(name: str, mask: Tensor) -> bool:
    """Whether a floating mask is added to the scores: it does not hold ones and zeros alone, or nothing but zeros.

    With two dimensions it may be one of weights, of a loss for instance.
    """
    if mask.ndim > 2:
        return not bool(((mask == 0) | (mask == 1)).all() & (mask == 1).any())
    return bool((mask < 0).any()) or ("att" in name.lower() and not bool(mask.any()))


def _refuse_unfit(name: str, tensor: Tensor, value: Value) -> None:
    """Refuse a value that the tensor's dtype cannot hold."""
    if tensor.is_floating_point():
        return
    if tensor.is_complex():
        raise ValueError(f"{name} is {tensor.dtype}; expected whole numbers")
    low, high = 0, 1
    if tensor.dtype is not torch.bool:
        limits = torch.iinfo(tensor.dtype)
        low, high = limits.min, limits.max
    if not low <= value <= high or value != int(value):
        raise ValueError(f"{name} is {tensor.dtype}, which cannot hold {value}, the value it is padded with")
