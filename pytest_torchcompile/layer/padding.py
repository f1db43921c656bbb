"""What a tensor of a batch is padded with, judged by its name, and along which of its dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        if is_mask(name) and not asked:
            return self._pad_mask(name, tensor)
        value = self.values[name] if asked else _value(name.lower(), self.config)
        if value is None or (value == LABEL and tensor.ndim == 1 and not asked):
            return tensor
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

    def _pad_mask(self, name: str, mask: Tensor) -> Tensor:
        if mask.ndim < 2 or mask.is_complex():
            raise ValueError(f"{name} has the shape {tuple(mask.shape)} and is {mask.dtype}; expected (batch, length), "
                             "or (..., queries, keys), of numbers that are not complex")
        seen, hidden = _seen_and_hidden(name, mask)
        if mask.ndim > 2:
            return self._pad_attention(name, mask, seen, hidden)
        return self._longer(mask, 1, self.config.bucket(mask.shape[1], name), hidden)

    def _pad_attention(self, name: str, mask: Tensor, seen: Value, hidden: Value) -> Tensor:
        """(..., queries, keys): added keys are hidden from all; added queries see the real keys.

        (A query that sees nothing is NaN after softmax.) Queries of size 1 are broadcast, and stay.
        """
        queries, keys = mask.shape[-2:]
        if queries != 1:
            mask = self._longer(mask, mask.ndim - 2, self.config.bucket(queries, f"{name} (its queries)"), seen)
        return self._longer(mask, mask.ndim - 1, self.config.bucket(keys, f"{name} (its keys)"), hidden)


def is_ids(name: str) -> bool:
    """Whether tensors of that name are token ids."""
    low = name.lower()
    if is_label(name) or low.endswith(("type_ids", "position_ids")):
        return False
    return low in ("ids", "tokens") or low.endswith("_ids")


def is_label(name: str) -> bool:
    """Whether tensors of that name are what a loss is told to expect."""
    return name.lower().removesuffix("_ids").endswith(("label", "labels", "target", "targets"))


def is_mask(name: str) -> bool:
    """Whether tensors of that name are masks."""
    return name.lower().endswith("mask")


_KINDS: Final[tuple[tuple[Callable[[str], bool], Callable[[BucketConfig], int]], ...]] = (
    (is_label, lambda config: LABEL),
    (lambda name: name.endswith(("type_ids", "position_ids")), lambda config: 0),
    (is_ids, lambda config: config.pad_token_id),
)
"""Whether a name is of that kind, and what tensors of the kind are padded with."""


def _value(name: str, config: BucketConfig) -> int | None:
    return next((value(config) for fits, value in _KINDS if fits(name)), None)


def _seen_and_hidden(name: str, mask: Tensor) -> tuple[Value, Value]:
    """What a mask says of a token that is attended to, and of one that is not.

    A padding mask, as torch has them, marks what is to be ignored. A floating mask may be one that is added to the
    scores (``scaled_dot_product_attention``).
    """
    if name.lower().endswith(("padding_mask", "pad_mask")):
        return _of_padding(name, mask)
    if not mask.is_floating_point() or not _is_added(name, mask):
        return 1, 0
    return 0.0, torch.finfo(mask.dtype).min


def _of_padding(name: str, mask: Tensor) -> tuple[Value, Value]:
    if mask.dtype is torch.bool:
        return False, True
    if not mask.is_floating_point() or bool((mask > 0).any()):
        raise ValueError(f"{name} is {mask.dtype} and does not say what it ignores; expected bool (True: ignored), or "
                         f"0 and -inf, or the value to pad with: pad_values={{{name!r}: ...}}")
    return 0.0, float("-inf")


def _is_added(name: str, mask: Tensor) -> bool:
    """Whether a floating mask is added to the scores: it does not hold ones and zeros alone, or nothing but zeros.

    With two dimensions it may be one of weights, of a loss for instance.
    """
    if mask.ndim > 2:
        return not bool(((mask == 0) | (mask == 1)).all() & (mask == 1).any())
    return bool((mask < 0).any()) or ("att" in name.lower() and not bool(mask.any()))


def _check_dtype(name: str, tensor: Tensor, value: Value, asked: bool) -> None:
    if tensor.is_floating_point() and asked:
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
