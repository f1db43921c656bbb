"""ShapeStabilizer: pad batches to a few lengths, so that a compiled model is not compiled for every one.

Not there yet: ``unpad``, padding on the left, pad values of one's own for a tensor, masks of more than two
dimensions, the choice of warm-up sizes, and ``warmup``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from pytest_torchcompile.layer.config import BucketConfig

__all__ = ["NAMES", "BucketConfig", "ShapeStabilizer"]

NAMES = ("input_ids", "attention_mask", "labels")
"""What the tensors of a tuple are, in order, unless the call says otherwise."""
_LABEL = -100
"""What torch's cross entropy ignores (``ignore_index``)."""

B = TypeVar("B")


class ShapeStabilizer:
    """Pads token batches on the right to the next bucket, and marks dimensions as dynamic.

    >>> stabilizer = ShapeStabilizer(buckets=(8, 16))
    >>> stabilizer.bucket_batch(torch.ones(2, 11, dtype=torch.int64)).shape
    torch.Size([2, 16])
    """

    def __init__(self, buckets: BucketConfig | Iterable[int] = BucketConfig()) -> None:  # noqa: B008 -- frozen
        self.config = buckets if isinstance(buckets, BucketConfig) else BucketConfig(buckets)  # type: ignore[arg-type]

    def bucket_batch(self, input_ids: Any, names: Sequence[str] = NAMES) -> Any:
        """Return the batch with its sequences, (batch, length), as long as the next bucket.

        A tensor is token ids. In a dict the key says what a tensor is, in a tuple or list its place in ``names``,
        in a named tuple its field: ``...mask`` is padded with 0, ``...labels`` and ``...targets`` with -100,
        ``token_type_ids`` and ``position_ids`` with 0, ``...ids`` and ``tokens`` with the config's ``pad_token_id``.
        Labels of one dimension (one for each sample), other keys, and what is no tensor stay as they are. Each
        tensor goes to the bucket of its own length; one that has it already is returned itself, not copied.

        Raises :class:`ValueError` for a tensor longer than the largest bucket, of other dimensions than (batch,
        length), or of a dtype that can't hold the value it is padded with, and for a batch without token ids.
        """
        batch = input_ids
        if isinstance(batch, Tensor):
            return self._padded("input_ids", batch)
        if isinstance(batch, Mapping):
            _need_ids(batch)
            return {name: self._padded(name, value) for name, value in batch.items()}
        if not isinstance(batch, (tuple, list)):
            raise ValueError(f"a batch of type {type(batch).__name__}; expected a tensor, a tuple or a dict")
        fields: Sequence[str] | None = getattr(batch, "_fields", None)
        if fields is None:
            fields = _by_place(batch, names)
        _need_ids(fields)
        padded = [self._padded(name, value) for name, value in zip(fields, batch, strict=True)]
        return type(batch)(*padded) if hasattr(batch, "_fields") else type(batch)(padded)

    def mark_dynamic_dims(self, batch: B, dim: int = 1) -> B:
        """Tell torch that dimension ``dim`` of every tensor in the batch varies, and return the batch itself.

        ``torch._dynamo.mark_dynamic`` (torch 2.8 to 2.15) writes on the tensor, so every new batch needs it. Tensors
        without that dimension are left alone, and those whose size in it is 0 or 1, which torch always compiles
        apart. Raises :class:`ValueError` if no tensor has that dimension.
        """
        import torch._dynamo

        found = [tensor for tensor in _tensors(batch) if -tensor.ndim <= dim < tensor.ndim]
        if not found:
            raise ValueError(f"no tensor of the batch has a dimension {dim}")
        for tensor in found:
            if tensor.shape[dim] > 1:
                torch._dynamo.mark_dynamic(tensor, dim % tensor.ndim)
        return batch

    def _padded(self, name: Any, value: Any) -> Any:
        pad = self._pad_value(str(name))
        if pad is None or not isinstance(value, Tensor) or (pad == _LABEL and value.ndim == 1):
            return value
        if value.ndim != 2:
            raise ValueError(f"{name} has the shape {tuple(value.shape)}; expected (batch, length)")
        _check_dtype(name, value, pad)
        missing = self.config.bucket(value.shape[1], str(name)) - value.shape[1]
        return functional.pad(value, (0, missing), value=pad) if missing else value

    def _pad_value(self, name: str) -> int | None:
        return next((value(self.config) for fits, value in _KINDS if fits(name.lower())), None)


_KINDS: tuple[tuple[Callable[[str], bool], Callable[[BucketConfig], int]], ...] = (
    (lambda name: name.endswith("mask"), lambda config: 0),
    (lambda name: name.endswith(("label", "labels", "target", "targets")), lambda config: _LABEL),
    (lambda name: name.endswith(("type_ids", "position_ids")), lambda config: 0),
    (lambda name: _is_ids(name), lambda config: config.pad_token_id),
)
"""Whether a name is of that kind, and what tensors of the kind are padded with."""


def _is_ids(name: str) -> bool:
    if name.endswith(("type_ids", "position_ids")):
        return False
    return name in ("ids", "tokens") or name.endswith("_ids")


def _need_ids(names: Iterable[Any]) -> None:
    listed = [str(name) for name in names]
    if not any(_is_ids(name.lower()) for name in listed):
        raise ValueError(f"no token ids in the batch ({', '.join(listed) or 'it is empty'}); expected a name "
                         "like input_ids, for example {'input_ids': ..., 'attention_mask': ...}")


def _by_place(batch: Sequence[Any], names: Sequence[str]) -> Sequence[str]:
    if len(batch) > len(names):
        raise ValueError(f"{len(batch)} values, and only {len(names)} names ({', '.join(names)}); "
                         "say what each is with names=(...), or pass a dict")
    if names is NAMES and len(batch) > 1:
        mask = batch[1]
        # (ids, labels) is as common as (ids, mask): labels padded with 0 would be trained on, and nobody told.
        if isinstance(mask, Tensor) and not _is_mask(mask):
            raise ValueError("the second tensor is no mask: it holds other values than 0 and 1; say what it is, "
                             "for example names=('input_ids', 'labels')")
    return names[: len(batch)]


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _check_dtype(name: str, tensor: Tensor, pad: int) -> None:
    if tensor.dtype is torch.bool:
        low, high = 0, 1
    elif tensor.is_floating_point() and pad == 0:  # a mask of weights
        return
    elif tensor.is_floating_point() or tensor.is_complex():
        raise ValueError(f"{name} is {tensor.dtype}; expected whole numbers")
    else:
        limits = torch.iinfo(tensor.dtype)
        low, high = limits.min, limits.max
    if not low <= pad <= high:
        raise ValueError(f"{name} is {tensor.dtype}, which cannot hold {pad}, the value it is padded with")


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from _tensors(value)
