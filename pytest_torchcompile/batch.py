"""Batch: what a model is called with, made from what the user's inputs factory returned."""

from __future__ import annotations

import copy
import operator
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["Batch", "KeptBatch", "source_of"]

# What users write on a tensor with torch._dynamo.mark_dynamic, mark_static and their kin (torch 2.8 to 2.13,
# _dynamo/decorators.py).
_MARKS = (
    "_dynamo_dynamic_indices",
    "_dynamo_dynamic_range",
    "_dynamo_hint_overrides",
    "_dynamo_shape_ids",
    "_dynamo_static_indices",
    "_dynamo_unbacked_bounds",
    "_dynamo_unbacked_indices",
    "_dynamo_weak_dynamic_indices",
    "_specialize_on",
)
_NOTED_BY_TORCH = "_dynamo_propagated_dynamic_indices"
"""Torch's own note about an earlier call (the same file). It changes what a later one compiles, so that neither a copy
has it nor a batch that is filled again."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SHARED = (torch.nn.Module, torch.Generator, ModuleType, FunctionType, type)


@dataclass(frozen=True, eq=False)
class Batch:
    """The arguments of one call, and the structure that the loss is given beside the output.

    ``args`` and ``kwargs`` hold the very tensors of ``value``: a model that writes to an argument
    writes to what the loss reads, as in a training loop.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    other_replicas: tuple[Batch, ...] = ()
    """Batches of the other data-parallel replicas, where one process runs those too; copied along."""

    @classmethod
    def of(cls, value: Any) -> Batch:
        """Split what an inputs factory returned into the arguments of a call.

        ======================================  ==========================================
        a dict                                  keyword arguments
        ``(tuple or list, dict)``               positional and keyword arguments
        another tuple or list, no named tuple   positional arguments
        anything else                           one positional argument
        ======================================  ==========================================
        """
        if isinstance(value, Batch):
            return value
        # What HF tokenizers return; a plain dict is a pytree, this is not.
        if isinstance(value, UserDict):
            value = dict(value)
        if isinstance(value, dict):
            return cls((), dict(value), value)
        if type(value) in (tuple, list):
            if len(value) == 2 and type(value[0]) in (tuple, list) and isinstance(value[1], dict):
                return cls(tuple(value[0]), dict(value[1]), value)
            return cls(tuple(value), {}, value)
        return cls((value,), {}, value)

    def clone(self) -> Batch:
        """Copy every tensor: values, strides, ``requires_grad``, sharing and the user's dynamic marks.

        Tensors of one storage share the copy's storage, and an input that is a view with gaps or
        of stride 0 stays one. Copies of leaves of the autograd graph are leaves; those of other tensors are no leaves
        either, so that they may be written to in place, and :func:`source_of` has their gradient. None has a gradient.
        """
        return self.to()

    def refill(self, other: Batch) -> bool:
        """Write the values of another batch into the tensors of this one; False where they don't go in.

        Both must have one structure, the same Python values, and plain tensors of the same form. None of this one may
        have become part of an autograd graph, or have got a hook or an attribute. As in a clone, none has a gradient or
        torch's note about an earlier call.
        """
        mine, structure = pytree.tree_flatten(self.value)
        theirs, other_structure = pytree.tree_flatten(other.value)
        if structure != other_structure or self.other_replicas or other.other_replicas:
            return False
        if not all(map(_can_be_refilled, mine, theirs)):
            return False
        with torch.no_grad():
            for target, source in zip(mine, theirs, strict=True):
                if isinstance(target, torch.Tensor):
                    target.copy_(source)
                    # A model that calls backward() itself would add to that of the call before.
                    target.grad = None
                    vars(target).pop(_NOTED_BY_TORCH, None)
        return True

    def with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """A copy in which each tensor is what ``change`` makes of it, with ``requires_grad`` and the dynamic marks.

        The other replicas are left out.
        """
        changed: dict[int, torch.Tensor] = {}

        def change_once(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in changed:
                new = change(leaf.detach()).requires_grad_(leaf.requires_grad)
                _copy_marks(leaf, new)
                changed[id(leaf)] = new
            return changed[id(leaf)]

        value = pytree.tree_map(change_once, self.value)
        return Batch((value,), {}, value) if self.is_one_argument else Batch.of(value)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Batch:
        """:meth:`clone` to a device and a dtype; only floating tensors change their dtype.

        Complex tensors become the complex dtype of that precision (float64: complex128).
        """
        if device is not None:
            device = torch.device(device)
        copies = _Copies(self.value, device, dtype)
        value = pytree.tree_map(copies.copy_of, self.value)
        copied = Batch((value,), {}, value) if self.is_one_argument else Batch.of(value)
        others = tuple(other.to(device, dtype) for other in self.other_replicas)
        return replace(copied, other_replicas=others)

    @property
    def is_one_argument(self) -> bool:
        """Whether the value as a whole is the only argument: a tensor is, a dict where somebody has made it so."""
        return len(self.args) == 1 and self.args[0] is self.value and not self.kwargs

    @property
    def for_loss(self) -> Any:
        """What a loss is given beside the output: the value, of a tuple with one dict in it that dict.

        The tuple is only there so that the dict is one argument of the model instead of its keyword arguments.
        """
        if type(self.value) in (tuple, list) and len(self.value) == 1 and isinstance(self.value[0], (dict, UserDict)):
            return self.value[0]
        return self.value

    @property
    def replicas(self) -> tuple[Batch, ...]:
        """The batches of all replicas that are run, this one first."""
        return self, *self.other_replicas

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor in ``value``, in order; none of other replicas."""
        return [leaf for leaf in pytree.tree_leaves(self.value) if isinstance(leaf, torch.Tensor)]

    @property
    def is_on_cuda(self) -> bool:
        """Whether any of its tensors is; the model may be elsewhere."""
        return any(tensor.is_cuda for tensor in self.tensors())


class KeptBatch:
    """A private copy of a batch that is filled again, as a caller does who keeps one buffer."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch.clone()
        self._tensors = self.batch.tensors()
        self._addresses = [_address_of(tensor) for tensor in self._tensors]

    def refill(self, other: Batch) -> bool:
        """:meth:`Batch.refill`, where each tensor is the one that was given and has its memory still.

        What a model has put in its place may be a parameter, a buffer, or an output that somebody holds.
        """
        tensors = self.batch.tensors()
        if len(tensors) != len(self._tensors) or not all(map(operator.is_, tensors, self._tensors)):
            return False
        if [_address_of(tensor) for tensor in tensors] != self._addresses:
            return False
        return self.batch.refill(other)


def _address_of(tensor: torch.Tensor) -> int | None:
    """Where its memory begins; None for what is not plain, and so never refilled."""
    return _storage_of(tensor) if _is_plain(tensor) else None


def _can_be_refilled(target: Any, source: Any) -> bool:
    """Whether a tensor of a batch can have the values of another one, or is the same Python value."""
    if not isinstance(target, torch.Tensor) or not isinstance(source, torch.Tensor):
        return type(target) is type(source) and isinstance(target, _PLAIN) and target == source
    if not _is_plain(target) or not _is_plain(source) or 0 in target.stride():
        return False
    if target._backward_hooks or getattr(target, "_post_accumulate_grad_hooks", None):
        return False
    # What torch notes there changes no value; what a model does may.
    if any(name not in vars(source) and not name.startswith("_dynamo") for name in vars(target)):
        return False
    if not target.is_leaf or not source.is_leaf or target.requires_grad != source.requires_grad:
        return False
    return _form_of(target) == _form_of(source)


def _form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _copy_marks(source: torch.Tensor, target: torch.Tensor) -> None:
    for mark in _MARKS:
        if hasattr(source, mark):
            setattr(target, mark, copy.copy(getattr(source, mark)))


def source_of(tensor: torch.Tensor) -> torch.Tensor:
    """The leaf at which the gradient of an input of a :class:`Batch` arrives: most often the input itself."""
    return getattr(tensor, "_torchcompile_source", tensor)


_ALIGNED = 64
"""Elements: an offset of so many is as good as none, for whatever instructions compiled code uses."""


class _Copies:
    """Copies of the leaves of one structure: each object once, storages shared as before."""

    def __init__(self, value: Any, device: torch.device | None, dtype: torch.dtype | None) -> None:
        self.device, self.dtype = device, dtype
        self.done: dict[int, Any] = {}
        self.storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.shared: set[int] = set()
        tensors = {id(t): t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)}
        seen: set[int] = set()
        for tensor in filter(_is_plain, tensors.values()):
            storage = _storage_of(tensor)
            if storage in seen:
                self.shared.add(storage)
            seen.add(storage)

    def copy_of(self, leaf: Any) -> Any:
        if id(leaf) not in self.done:
            copied = self.copy_tensor(leaf) if isinstance(leaf, torch.Tensor) else _copy_leaf(leaf)
            # The original is kept beside its copy, or its id could be given to another object.
            self.done[id(leaf)] = (leaf, copied)
        return self.done[id(leaf)][1]

    def copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        # The copy is no part of the graph that the user's tensor may belong to.
        with torch.no_grad():
            new = self.copy_data(tensor.detach())
        if isinstance(tensor, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
        else:
            new.requires_grad_(tensor.requires_grad)
            if not tensor.is_leaf:
                new = self.copy_as_result(tensor, new)
        _copy_marks(tensor, new)
        return new

    def copy_as_result(self, tensor: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor that is the result of an operation: such a one may be written to in place, a leaf not.

        Its gradient arrives at the leaf that it was copied from, which :func:`source_of` finds.
        """
        if not _is_plain(tensor) or _storage_of(tensor) in self.shared or not _is_dense(tensor):
            return leaf
        with torch.enable_grad():
            copied = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(leaf)
        copied._torchcompile_source = leaf  # type: ignore[attr-defined]
        return copied

    def copy_data(self, tensor: torch.Tensor) -> torch.Tensor:
        device, dtype = self.device or tensor.device, self.target_dtype(tensor.dtype)
        if not _is_plain(tensor):
            return tensor.to(device=device, dtype=dtype, copy=True)
        if _storage_of(tensor) not in self.shared and _is_dense(tensor):
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
            # What is not aligned stays so: compiled code may read such memory in another way.
            if offset := tensor.storage_offset() % _ALIGNED:
                memory = torch.empty(offset + tensor.numel(), dtype=dtype, device=device).untyped_storage()
                # Not a view, as the copy of an aligned tensor is none: Dynamo guards what a view is a view of.
                new.set_(memory, offset, tensor.shape, tensor.stride())
            return new.copy_(tensor)
        # The whole storage is copied once, and each tensor that shares it becomes a view of the copy.
        key = (_storage_of(tensor), tensor.dtype)
        if key not in self.storages:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
            self.storages[key] = whole.to(device=device, dtype=dtype, copy=True)
        return self.storages[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def target_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if self.dtype is None or not (dtype.is_floating_point or dtype.is_complex):
            return dtype
        return self.dtype.to_complex() if dtype.is_complex else self.dtype


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is strided memory and nothing else (no subclass, sparse, nested or meta tensor)."""
    kind = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return kind and tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type != "meta"


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their stretch of memory without gaps or overlap."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        # A dim of one element may have any stride.
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _copy_leaf(leaf: Any) -> Any:
    """A private copy of a leaf that is no tensor; what can't be copied is handed on as it is."""
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes, *_SHARED)):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:
        return leaf
