"""ShapeStabilizer: pad batches to a few lengths, so that a compiled model is not compiled for every one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from pytest_torchcompile.layer.config import BucketConfig
from pytest_torchcompile.layer.padding import SIDES, Padding, is_ids, is_label
from pytest_torchcompile.layer.warmup import Warmup, warm_up

__all__ = ["NAMES", "BucketConfig", "ShapeStabilizer"]

NAMES = ("input_ids", "attention_mask", "labels")
"""What the tensors of a tuple are, in order, unless the call says otherwise."""

B = TypeVar("B")


class ShapeStabilizer:
    """Pads token batches to the next bucket and back, marks dimensions as dynamic, warms a model up.

    >>> stabilizer = ShapeStabilizer(buckets=(8, 16))
    >>> batch = torch.ones(2, 11, dtype=torch.int64)
    >>> padded = stabilizer.bucket_batch(batch)
    >>> padded.shape, stabilizer.unpad(padded, batch).shape
    (torch.Size([2, 16]), torch.Size([2, 11]))
    """

    def __init__(
        self,
        buckets: BucketConfig | Iterable[int] = BucketConfig(),  # noqa: B008 -- frozen
        *,
        side: str = "right",
        pad_values: Mapping[str, float | None] | None = None,
    ) -> None:
        """``side`` is where the padding goes; generation wants it on the left.

        ``pad_values`` gives tensors of a name another value, or one to tensors that would stay as they are (which are
        padded along their second dimension, however many they have); None leaves them alone. Raises
        :class:`ValueError` for another side.
        """
        self.config = buckets if isinstance(buckets, BucketConfig) else BucketConfig(buckets)  # type: ignore[arg-type]
        if side not in SIDES:
            raise ValueError(f"side={side!r}: expected 'right' or 'left'")
        self._padding = Padding(self.config, side, dict(pad_values or {}))

    def bucket_batch(self, input_ids: Any, names: Sequence[str] = NAMES) -> Any:
        """Return the batch with its sequences, (batch, length), as long as the next bucket.

        A tensor is token ids. In a dict the key says what a tensor is, in a tuple or list its place in ``names``, in
        a named tuple its field. Batches nest; tensors of a tuple inside of another batch go by the tuple's name.
        ``...mask`` is padded with 0, ``...padding_mask`` with True, or -inf in a floating one, ``...labels``,
        ``...targets``, ``label_ids`` and ``target_ids`` with -100, ``token_type_ids`` and ``position_ids`` with 0,
        ``...ids`` and ``tokens`` with the config's ``pad_token_id``.

        Masks of more than two dimensions are (..., queries, keys). Added keys are hidden from every query, added
        queries see the real keys. A floating mask is one that is added to the scores, unless it holds but 0 and 1; of
        two dimensions, if it holds a negative number, or is an attention mask of zeros: padded with the lowest number.

        Labels of one dimension (one for each sample), other keys, and what is no tensor stay as they are. Each tensor
        goes to the bucket of its own length; one that has it already is returned itself, not copied.

        Raises :class:`ValueError` for a tensor longer than the largest bucket, of other dimensions than (batch,
        length), or of a dtype that can't hold the value it is padded with, and for a batch without token ids.
        """
        batch = input_ids
        if isinstance(batch, Tensor):
            return self._padding.pad("input_ids", batch)
        if not isinstance(batch, (Mapping, tuple, list)):
            raise ValueError(f"a batch of type {type(batch).__name__}; expected a tensor, a tuple or a dict")
        _need_ids(_listed(batch, names))
        return self._padded(batch, _own_names(batch, names))

    def unpad(self, padded: Any, batch: Any, dim: int = 1) -> Any:
        """Take off what :meth:`bucket_batch` put on: views, nothing is copied.

        Args:
            padded: A batch that was padded, or what a model made of it: any structure of tensors.
            batch: The batch before, or its length. A padded batch gets the very shapes back. Of an output, which has
                another structure, each tensor whose size in ``dim`` is the bucket of some token ids or labels is cut
                to their length.
            dim: The dimension of lengths in an output.

        Raises :class:`ValueError` where an output has no tensor of a bucket's size in that dimension, and where two
        lengths of the batch have the bucket that a tensor has, so that nobody knows which of them is meant.
        """
        if not isinstance(batch, int) and self._fits(padded, batch):
            return _map(padded, batch, self._as_before)
        lengths: dict[int, set[int]] = {}
        for length in (batch,) if isinstance(batch, int) else _lengths(batch):
            lengths.setdefault(self.config.bucket(length), set()).add(length)
        lengths = {bucket: found for bucket, found in lengths.items() if found != {bucket}}
        if not lengths:
            return padded
        _check_sizes(padded, lengths, dim)
        return _map(padded, padded, lambda t, _: self._cut(t, lengths.get(_size(t, dim) or 0), dim))

    def mark_dynamic_dims(self, batch: B, dim: int = 1, min: int | None = None, max: int | None = None) -> B:
        """Tell torch that dimension ``dim`` of every tensor in the batch varies, and return the batch itself.

        ``min`` and ``max`` are the least and the largest size that will come; within them torch may leave out guards.
        ``torch._dynamo.mark_dynamic`` (torch 2.8 to 2.15) writes on the tensor, so every new batch needs it. Tensors
        without that dimension are left alone, and those whose size in it is 0 or 1, which torch always compiles
        apart. Raises :class:`ValueError` if no tensor has that dimension, or if a size is outside of the bounds.
        """
        import torch._dynamo

        found = [tensor for tensor in _tensors(batch) if _size(tensor, dim) is not None]
        if not found:
            raise ValueError(f"no tensor of the batch has a dimension {dim}")
        for tensor in found:
            size = tensor.shape[dim]
            if (min is not None and size < min) or (max is not None and size > max):
                raise ValueError(f"a tensor of the shape {tuple(tensor.shape)} has {size} in dimension {dim}, which is "
                                 f"outside of min={min}, max={max}")
        for tensor in found:
            if tensor.shape[dim] > 1:
                torch._dynamo.mark_dynamic(tensor, dim % tensor.ndim, min=min, max=max)
        return batch

    def warmup(
        self, model: Callable[..., Any], make_batch: Callable[..., Any], *, batch_sizes: Iterable[int] = (),
        names: Sequence[str] = NAMES,
    ) -> Warmup:
        """Compile every bucket before the first request comes, and say what was compiled for which.

        The model is run in the caller's grad mode, and its state and the random states are put back; see
        :func:`~pytest_torchcompile.layer.warmup.warm_up` for how batches are made and what is returned.
        """
        return warm_up(model, make_batch, self.config.buckets, lambda batch: self.bucket_batch(batch, names),
                       tuple(batch_sizes))

    def _cut(self, tensor: Tensor, lengths: set[int] | None, dim: int) -> Tensor:
        return self._padding.cut(tensor, dim, *lengths) if lengths else tensor

    def _padded(self, value: Any, names: Mapping[Any, str] | str) -> Any:
        if isinstance(names, str) and isinstance(value, Tensor):
            return self._padding.pad(names, value)
        if isinstance(value, Mapping):
            return {key: self._padded(held, str(key)) for key, held in value.items()}
        if isinstance(value, (tuple, list)):
            inner = _own_names(value, ()) if isinstance(names, str) and hasattr(value, "_fields") else names
            held = [self._padded(each, inner if isinstance(inner, str) else inner[i]) for i, each in enumerate(value)]
            return type(value)(*held) if hasattr(value, "_fields") else type(value)(held)
        return value

    def _fits(self, padded: Any, before: Any) -> bool:
        """Whether ``padded`` can be what ``before`` became: the same structure, every size its own or its bucket."""
        if isinstance(padded, Tensor) and isinstance(before, Tensor):
            return padded.ndim == before.ndim and all(
                mine == size or (size < mine and mine in self.config.buckets and mine == self.config.bucket(size))
                for mine, size in zip(padded.shape, before.shape, strict=True))
        if isinstance(padded, Mapping) and isinstance(before, Mapping):
            return padded.keys() == before.keys() and all(self._fits(padded[key], before[key]) for key in padded)
        if isinstance(padded, (tuple, list)) and isinstance(before, (tuple, list)):
            return len(padded) == len(before) and all(map(self._fits, padded, before))
        return type(padded) is type(before) and not isinstance(padded, Tensor)

    def _as_before(self, padded: Tensor, before: Tensor) -> Tensor:
        for dim, size in enumerate(before.shape):
            if padded.shape[dim] != size:
                padded = self._padding.cut(padded, dim, size)
        return padded


def _own_names(batch: Any, names: Sequence[str]) -> dict[Any, str]:
    """Place or key of each value of a batch to its name."""
    if isinstance(batch, Mapping):
        return {key: str(key) for key in batch}
    return dict(enumerate(getattr(batch, "_fields", None) or _by_place(batch, names)))


def _listed(batch: Any, names: Sequence[str]) -> Iterator[str]:
    """Every name in a batch, also of the dicts in it."""
    for key, name in _own_names(batch, names).items():
        yield name
        if isinstance(batch[key], Mapping):
            yield from _listed(batch[key], ())


def _need_ids(names: Iterable[str]) -> None:
    listed = list(names)
    if not any(map(is_ids, listed)):
        raise ValueError(f"no token ids in the batch ({', '.join(listed) or 'it is empty'}); expected a name "
                         "like input_ids, for example {'input_ids': ..., 'attention_mask': ...}")


def _by_place(batch: Sequence[Any], names: Sequence[str]) -> Sequence[str]:
    if len(batch) > len(names):
        raise ValueError(f"{len(batch)} values, and only {len(names)} names ({', '.join(names)}); "
                         "say what each is with names=(...), or pass a dict")
    if names is NAMES and len(batch) > 1:
        mask = batch[1]
        # (ids, labels) is as common as (ids, mask): labels padded with 0 would be trained on, and nobody told.
        if isinstance(mask, Tensor) and mask.ndim < 3 and not _is_mask(mask):
            raise ValueError("the second tensor is no mask: it holds other values than 0 and 1; say what it is, "
                             "for example names=('input_ids', 'labels')")
    return names[: len(batch)]


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _size(tensor: Tensor, dim: int) -> int | None:
    return tensor.shape[dim] if -tensor.ndim <= dim < tensor.ndim else None


def _check_sizes(output: Any, lengths: Mapping[int, set[int]], dim: int) -> None:
    """Refuse an output of which nothing is to be cut, or nobody knows to what length."""
    tensors = list(_tensors(output))
    sizes = {_size(tensor, dim) for tensor in tensors}
    if sizes.isdisjoint(lengths):
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors) or "there are none"
        buckets = " or ".join(map(str, sorted(lengths)))
        raise ValueError(f"no tensor has the bucket's size, {buckets}, in dimension {dim} (shapes: {shapes})")
    for bucket, found in lengths.items():
        if len(found) > 1 and bucket in sizes:
            listed = " and ".join(map(str, sorted(found)))
            raise ValueError(f"an output has {bucket} in dimension {dim}, the bucket of sequences of length {listed} "
                             "in the batch: which is meant? Unpad each output by itself, with its length")


def _lengths(batch: Any) -> list[int]:
    """The lengths of the token ids and labels of a batch: of its first tensor, where nothing is named."""
    named = dict(zip(batch._fields, batch, strict=True)) if hasattr(batch, "_fields") else batch
    if isinstance(named, Mapping):
        ids, labels = (list(_sequences(named, kind)) for kind in (is_ids, is_label))
        found = [*ids, *labels] if ids else []
    else:
        found = [*islice(_tensors(batch), 1)]
    if not found or found[0].ndim < 2:
        raise ValueError("the batch has no token ids, so its length is not known; pass the length itself")
    return [tensor.shape[1] for tensor in found]


def _sequences(batch: Mapping[Any, Any], kind: Callable[[str], bool]) -> Iterator[Tensor]:
    """Tensors of (batch, length) that are of a kind by their names, also in the dicts inside."""
    for name, value in batch.items():
        if isinstance(value, Mapping):
            yield from _sequences(value, kind)
        elif kind(str(name)):
            yield from (tensor for tensor in _tensors(value) if tensor.ndim == 2)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from _tensors(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        yield from _tensors([getattr(batch, f.name) for f in fields(batch)])


def _map(value: Any, other: Any, change: Callable[[Tensor, Any], Tensor]) -> Any:
    """The structure with each tensor changed, by what ``other`` has in its place."""
    if isinstance(value, Tensor):
        return change(value, other)
    if isinstance(value, Mapping):
        changed = {key: _map(held, other[key], change) for key, held in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return changed
        filled = copy.copy(value)
        filled.update(changed)
        return filled
    if isinstance(value, (tuple, list)):
        held = [_map(each, other[i], change) for i, each in enumerate(value)]
        return type(value)(*held) if hasattr(value, "_fields") else type(value)(held)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _map(getattr(value, f.name), getattr(other, f.name), change)
                                 for f in fields(value) if f.init})
    return value
