"""ShapeStabilizer: pad batches to a few lengths, so that a compiled model is not compiled for every one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from pytest_torchcompile.layer.config import BucketConfig
from pytest_torchcompile.layer.padding import SIDES, Padding, is_ids, is_label

if TYPE_CHECKING:
    from pytest_torchcompile.layer.warmup import Warmup

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
        if not isinstance(buckets, BucketConfig):
            buckets = BucketConfig(buckets)  # type: ignore[arg-type]
        self.config = buckets
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
        # A tensor alone has no name.
        if isinstance(batch, Tensor):
            return self._padding.pad("input_ids", batch)
        if not isinstance(batch, (Mapping, tuple, list)):
            raise ValueError(f"a batch of type {type(batch).__name__}; expected a tensor, a tuple or a dict")
        _refuse_without_ids(_names_inside(batch, names))
        return self._padded_values(batch, _value_names(batch, names))

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
        if isinstance(batch, int):
            lengths = [batch]
        elif self._may_come_from(padded, batch):
            return _map_tensors(padded, batch, self._cut_to_shape)
        else:
            lengths = _sequence_lengths(batch)
        by_bucket: dict[int, set[int]] = {}
        for length in lengths:
            by_bucket.setdefault(self.config.bucket(length), set()).add(length)
        # Where every sequence has its bucket's length nothing was put on.
        by_bucket = {bucket: those for bucket, those in by_bucket.items() if those != {bucket}}
        if not by_bucket:
            return padded
        _refuse_unclear_sizes(padded, by_bucket, dim)

        def cut(tensor: Tensor, _: Tensor) -> Tensor:
            size = _size_in(tensor, dim)
            if size not in by_bucket:
                return tensor
            (length,) = by_bucket[size]
            return self._padding.cut(tensor, dim, length)

        return _map_tensors(padded, padded, cut)

    def mark_dynamic_dims(self, batch: B, dim: int = 1, min: int | None = None, max: int | None = None) -> B:
        """Tell torch that dimension ``dim`` of every tensor in the batch varies, and return the batch itself.

        ``min`` and ``max`` are the least and the largest size that will come; within them torch may leave out guards.
        ``torch._dynamo.mark_dynamic`` (torch 2.8 to 2.15) writes on the tensor, so every new batch needs it. Tensors
        without that dimension are left alone, and those whose size in it is 0 or 1, which torch always compiles
        apart. Raises :class:`ValueError` if no tensor has that dimension, or if a size is outside of the bounds.
        """
        import torch._dynamo

        tensors = [tensor for tensor in _tensors_in(batch) if _size_in(tensor, dim) is not None]
        if not tensors:
            raise ValueError(f"no tensor of the batch has a dimension {dim}")
        # All are looked at before the first is marked.
        for tensor in tensors:
            size = tensor.shape[dim]
            if (min is not None and size < min) or (max is not None and size > max):
                raise ValueError(f"a tensor of the shape {tuple(tensor.shape)} has {size} in dimension {dim}, which is "
                                 f"outside of min={min}, max={max}")
        for tensor in tensors:
            # 0 and 1 are compiled apart, whatever is marked.
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
        # What a batch is padded with needs none of what watches a compiler.
        from pytest_torchcompile.layer.warmup import warm_up

        def pad(batch: Any) -> Any:
            return self.bucket_batch(batch, names)

        return warm_up(model, make_batch, self.config.buckets, pad, tuple(batch_sizes))

    def _padded_values(self, value: Any, names: Mapping[Any, str] | str) -> Any:
        """The values of a batch, each padded as its name says; ``names`` by key or place, or one name for all."""
        if isinstance(names, str) and isinstance(value, Tensor):
            return self._padding.pad(names, value)
        if isinstance(value, Mapping):
            return {key: self._padded_values(inner, str(key)) for key, inner in value.items()}
        if not isinstance(value, (tuple, list)):
            return value
        # A named tuple inside of another batch knows better than the name of the whole.
        if isinstance(names, str) and hasattr(value, "_fields"):
            names = _value_names(value, ())
        padded: list[Any] = []
        for place, inner in enumerate(value):
            name = names if isinstance(names, str) else names[place]
            padded.append(self._padded_values(inner, name))
        return _like(value, padded)

    def _may_come_from(self, padded: Any, before: Any) -> bool:
        """Whether ``padded`` can be what ``before`` became: the same structure, every size its own or its bucket."""
        if isinstance(padded, Tensor) and isinstance(before, Tensor):
            return padded.ndim == before.ndim and all(map(self._size_may_come_from, padded.shape, before.shape))
        if isinstance(padded, Mapping) and isinstance(before, Mapping):
            if padded.keys() != before.keys():
                return False
            return all(self._may_come_from(padded[key], before[key]) for key in padded)
        if isinstance(padded, (tuple, list)) and isinstance(before, (tuple, list)):
            return len(padded) == len(before) and all(map(self._may_come_from, padded, before))
        return type(padded) is type(before) and not isinstance(padded, Tensor)

    def _size_may_come_from(self, padded: int, before: int) -> bool:
        if padded == before:
            return True
        # bucket() raises for a size beyond the largest one, so it is asked last.
        return before < padded and padded in self.config.buckets and padded == self.config.bucket(before)

    def _cut_to_shape(self, padded: Tensor, before: Tensor) -> Tensor:
        for dim, size in enumerate(before.shape):
            if padded.shape[dim] != size:
                padded = self._padding.cut(padded, dim, size)
        return padded


def _value_names(batch: Any, names: Sequence[str]) -> dict[Any, str]:
    """Place or key of each value of a batch to its name."""
    if isinstance(batch, Mapping):
        return {key: str(key) for key in batch}
    own_names = getattr(batch, "_fields", None)
    if own_names:
        return dict(enumerate(own_names))
    return dict(enumerate(_names_by_place(batch, names)))


def _names_inside(batch: Any, names: Sequence[str]) -> Iterator[str]:
    """Every name in a batch, also of the dicts in it."""
    for key, name in _value_names(batch, names).items():
        yield name
        if isinstance(batch[key], Mapping):
            yield from _names_inside(batch[key], ())


def _refuse_without_ids(names: Iterable[str]) -> None:
    listed = list(names)
    if not any(map(is_ids, listed)):
        raise ValueError(f"no token ids in the batch ({', '.join(listed) or 'it is empty'}); expected a name "
                         "like input_ids, for example {'input_ids': ..., 'attention_mask': ...}")


def _names_by_place(batch: Sequence[Any], names: Sequence[str]) -> Sequence[str]:
    if len(batch) > len(names):
        raise ValueError(f"{len(batch)} values, and only {len(names)} names ({', '.join(names)}); "
                         "say what each is with names=(...), or pass a dict")
    if names is NAMES and len(batch) > 1:
        mask = batch[1]
        # (ids, labels) is as common as (ids, mask): labels padded with 0 would be trained on, and nobody told.
        if isinstance(mask, Tensor) and mask.ndim < 3 and not _holds_zeros_and_ones(mask):
            raise ValueError("the second tensor is no mask: it holds other values than 0 and 1; say what it is, "
                             "for example names=('input_ids', 'labels')")
    return names[: len(batch)]


def _holds_zeros_and_ones(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _size_in(tensor: Tensor, dim: int) -> int | None:
    return tensor.shape[dim] if -tensor.ndim <= dim < tensor.ndim else None


def _refuse_unclear_sizes(output: Any, by_bucket: Mapping[int, set[int]], dim: int) -> None:
    """Refuse an output of which nothing is to be cut, or nobody knows to what length."""
    tensors = list(_tensors_in(output))
    sizes = {_size_in(tensor, dim) for tensor in tensors}
    if sizes.isdisjoint(by_bucket):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "there are none"
        buckets = " or ".join(map(str, sorted(by_bucket)))
        raise ValueError(f"no tensor has the bucket's size, {buckets}, in dimension {dim} (shapes: {shapes})")
    for bucket, lengths in by_bucket.items():
        if len(lengths) > 1 and bucket in sizes:
            listed = " and ".join(map(str, sorted(lengths)))
            raise ValueError(f"an output has {bucket} in dimension {dim}, the bucket of sequences of length {listed} "
                             "in the batch: which is meant? Unpad each output by itself, with its length")


def _sequence_lengths(batch: Any) -> list[int]:
    """The lengths of the token ids and labels of a batch: of its first tensor, where nothing is named."""
    named = dict(zip(batch._fields, batch, strict=True)) if hasattr(batch, "_fields") else batch
    sequences: list[Tensor] = []
    if isinstance(named, Mapping):
        sequences = list(_sequences_named(named, is_ids))
        # Labels alone do not say that the batch is one of tokens.
        if sequences:
            sequences += _sequences_named(named, is_label)
    else:
        first = next(_tensors_in(batch), None)
        if first is not None:
            sequences = [first]
    if not sequences or sequences[0].ndim < 2:
        raise ValueError("the batch has no token ids, so its length is not known; pass the length itself")
    return [tensor.shape[1] for tensor in sequences]


def _sequences_named(batch: Mapping[Any, Any], is_meant: Callable[[str], bool]) -> Iterator[Tensor]:
    """Tensors of (batch, length) that are of a kind by their names, also in the dicts inside."""
    for name, value in batch.items():
        if isinstance(value, Mapping):
            yield from _sequences_named(value, is_meant)
        elif is_meant(str(name)):
            yield from (tensor for tensor in _tensors_in(value) if tensor.ndim == 2)


def _tensors_in(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors_in(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from _tensors_in(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from _tensors_in(getattr(batch, field.name))


def _map_tensors(value: Any, other: Any, change: Callable[[Tensor, Any], Tensor]) -> Any:
    """The structure with each tensor changed, by what ``other`` has in its place."""
    if isinstance(value, Tensor):
        return change(value, other)
    if isinstance(value, Mapping):
        changed = {key: _map_tensors(inner, other[key], change) for key, inner in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return changed
        # An output of a library keeps its class.
        filled = copy.copy(value)
        filled.update(changed)
        return filled
    if isinstance(value, (tuple, list)):
        return _like(value, [_map_tensors(inner, other[place], change) for place, inner in enumerate(value)])
    if is_dataclass(value) and not isinstance(value, type):
        attributes: dict[str, Any] = {}
        for field in fields(value):
            if field.init:
                inner, its_other = getattr(value, field.name), getattr(other, field.name)
                attributes[field.name] = _map_tensors(inner, its_other, change)
        return replace(value, **attributes)
    return value


def _like(before: Any, values: list[Any]) -> Any:
    """A sequence of the same class; named tuples take their values one by one."""
    if hasattr(before, "_fields"):
        return type(before)(*values)
    return type(before)(values)
