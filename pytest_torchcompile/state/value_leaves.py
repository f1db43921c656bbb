"""What is inside of a value: its leaves, each with the path that a user would write to reach it; the containers that
can be refilled; the tensors that modules hold outside of their parameters and buffers.

And what a tensor holds, in whatever form: sparse, nested, quantised, spread over ranks; compared bit by bit. Reading
the whole of a tensor that is spread over ranks (``DTensor``) is collective: every rank has to ask for the same tensors
in the same order.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = [
    "COMPRESSED", "STANDARD_PACKAGES", "attribute_tensors", "computable", "containers_in", "dense_form", "fingerprint",
    "holds_tensors", "inner_attributes", "is_plain", "is_spread", "layout_of", "leaves_of", "own_attributes",
    "own_part", "same_bits", "stored_numbers", "subclass_of", "tensors_of", "true_on_any_rank", "visible_strides",
    "whole_value", "write_whole",
]

COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
"""Layouts of tensors that are sparse by rows or by columns."""


def computable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; 8-bit floats as float32, which holds all of them: torch has next to no arithmetic of theirs."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor


def dense_form(tensor: torch.Tensor) -> torch.Tensor:
    """The values as a strided tensor; of a nested tensor one after the other, flat. Gradients pass through."""
    if tensor.is_nested:
        # Nested tensors have few operators of their own; both kinds of them have unbind.
        parts = [part.reshape(-1) for part in tensor.unbind()]
        if not parts:
            return torch.zeros(0, dtype=tensor.dtype, device=tensor.device)
        return torch.cat(parts)
    if tensor.is_quantized:
        return tensor.dequantize()
    if type(tensor).__name__ == "MaskedTensor":  # of torch.masked; what is masked out has no value
        return tensor.to_tensor(0)  # type: ignore[no-any-return, attr-defined]
    if tensor.layout is torch.strided:
        return tensor
    return tensor.to_dense()


def stored_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that a tensor keeps in memory: the tensor itself, or what a sparse one has beside its indices.

    It shares the tensor's memory. Of a sparse tensor only (nnz, *dense sizes), or blocks of these.
    """
    if tensor.layout is torch.sparse_coo:
        # Private, torch 2.8 to 2.15: `values` raises for what is not coalesced.
        return tensor._values()
    if tensor.layout in COMPRESSED:
        return tensor.values()
    return tensor


def layout_of(tensor: torch.Tensor) -> str:
    """What :func:`dense_form` leaves out: kind, and for nested tensors all sizes. Equal texts mean equal layouts."""
    if tensor.is_nested:
        return f"nested, {tensor.layout}, of {[tuple(part.shape) for part in tensor.unbind()]}"
    if tensor.is_quantized:
        return f"quantised, {tensor.qscheme()}"
    if type(tensor).__name__ == "MaskedTensor":
        return f"masked, {fingerprint(tensor.get_mask()).tolist()}"  # type: ignore[attr-defined]
    if tensor.layout is torch.sparse_coo and not tensor.is_coalesced():
        return f"{tensor.layout}, not coalesced"
    return str(tensor.layout)


# `AsyncCollectiveTensor` is what a collective gives until somebody waits for it (torch 2.8 to 2.15).
_CLASSES_OF_TORCH = frozenset({"Tensor", "Parameter", "Buffer", "AsyncCollectiveTensor", "FakeTensor"})


def subclass_of(tensor: torch.Tensor) -> str:
    """The name of a class of tensors that is none of torch's own plain ones; empty for those, and for what is spread.

    What a distributed tensor is on one rank says nothing of what it is in one process.
    """
    name = type(tensor).__name__
    if name in _CLASSES_OF_TORCH or is_spread(tensor):
        return ""
    return name


def visible_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides of the axes longer than one; ``None`` where the layout has none or the tensor is empty."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return None
    # The stride of an axis of length one is never used, and torch sets it as it likes.
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is torch's own kind of tensor, with memory of its own, in strides."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether a rank holds only a part of the tensor."""
    return callable(getattr(tensor, "full_tensor", None))


def whole_value(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, detached: gathered from the ranks, or the tensor itself."""
    detached: Any = tensor.detach()
    if is_spread(detached):
        return detached.full_tensor()  # type: ignore[no-any-return]
    return detached  # type: ignore[no-any-return]


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, detached: its part of one that is spread, or the tensor itself."""
    detached: Any = tensor.detach()
    if is_spread(detached):
        return detached.to_local()  # type: ignore[no-any-return]
    return detached  # type: ignore[no-any-return]


def true_on_any_rank(tensors: Mapping[str, torch.Tensor], here: Mapping[str, bool]) -> dict[str, bool]:
    """What ranks have found out about their own parts of spread tensors, as all of them have to act on it.

    ``tensors``: tensors that are spread (``DTensor``), by name. ``here``: this rank's answer to each. Returns for each
    whether any rank of its mesh said yes. Collective, as :func:`whole_value` is, but once for each dimension of a mesh
    and not once for each tensor.
    """
    by_mesh: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        by_mesh.setdefault(tensor.device_mesh, []).append(name)  # type: ignore[attr-defined]
    anywhere: dict[str, bool] = {}
    for mesh, names in by_mesh.items():
        device = own_part(tensors[names[0]]).device
        votes = torch.tensor([int(here[name]) for name in names], device=device)
        # One dimension after the other reaches every rank of the mesh.
        for dimension in range(mesh.ndim):
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, mesh.get_group(dimension))
        for name, vote in zip(names, votes.tolist(), strict=True):
            anywhere[name] = bool(vote)
    return anywhere


def write_whole(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write a whole value, the same on every rank, in place; each rank keeps its part of it."""
    if is_spread(tensor):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        tensor.copy_(distribute_tensor(value, mesh, placements, src_data_rank=None))
    else:
        tensor.copy_(value)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and all values agree; NaN equals NaN, and 0.0 equals -0.0."""
    if one.dtype != other.dtype or one.device != other.device or layout_of(one) != layout_of(other):
        return False
    one, other = dense_form(one), dense_form(other)
    if one.shape != other.shape:
        return False
    # The quickest answer, and right for nearly all: only NaN, which equals nothing, needs a second look.
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    one, other = computable(one), computable(other)
    # Without a NaN they are simply different. A sum with one is NaN, and is made in a tenth of the time.
    if not bool(one.sum().isnan()):
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers that change when the values do, in all likelihood. On the tensor's device: a GPU is not waited for."""
    if not is_plain(tensor) or tensor.numel() == 0 or tensor.device.type == "meta":
        return torch.empty(0, device="cpu")
    flat = tensor.detach()
    # A sum in half precision would not notice the change of one element.
    sum_dtype = torch.float32 if flat.is_floating_point() and flat.dtype.itemsize < 4 else None
    flat = flat.reshape(-1)
    # several sums, so that elements that have changed places are noticed too
    return torch.stack([flat[::step].sum(dtype=sum_dtype) for step in (1, 2, 7)])


# ----------------------------------------------------------------------------------------------- leaves and their paths
# An exception leads to all that was there when it was raised, as those of Dynamo lead to its tracer.
_CLOSED = (torch.nn.Module, torch.Tensor, ModuleType, type, enum.Enum, torch.Generator, torch.dtype, torch.device,
           BaseException)
# Objects of these packages (loggers, threads, files) belong to the process, and lead to everything in it.
STANDARD_PACKAGES = sys.stdlib_module_names - {"argparse", "collections", "types"}
# Objects inside objects are opened so deep.
_DEPTH = 6
# What every module has: registries of parameters, buffers, submodules and hooks.
_ATTRIBUTES_OF_TORCH = frozenset(vars(torch.nn.Module()))
_REFILLABLE = (list, dict, deque, set)
# Values that hold no tensor of their own; submodules are walked by themselves.
_WITHOUT_TENSORS = (bool, int, float, str, bytes, type(None), torch.nn.Module)


def leaves_of(value: Any) -> tuple[list[tuple[str, Any]], str]:
    """Return ``[(path, leaf)]`` and a text that is equal for equal structures.

    Any pytree (so also what transformers registers), dataclasses that nobody registered, and other objects that
    hold tensors in attributes (a cache, a distribution), at any depth. A leaf is a tensor or a Python object.
    Uses ``torch.utils._pytree.tree_flatten_with_path`` and ``keystr`` (torch 2.2 to 2.15).
    """
    return _leaves_below(value, ())


def tensors_of(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Only the leaves that are tensors."""
    for path, leaf in leaves_of(value)[0]:
        if isinstance(leaf, torch.Tensor):
            yield path, leaf


@dataclass(frozen=True)
class _Attribute:
    """An attribute of an opened object: its own leaves and structure."""

    name: str
    leaves: list[tuple[str, Any]]
    structure: str


def _leaves_below(value: Any, above: tuple[int, ...]) -> tuple[list[tuple[str, Any]], str]:
    """``above`` are the ids of the objects that were opened on the way here: one that holds itself ends there."""
    leaves: list[tuple[str, Any]] = []
    opened_structures: list[str] = []
    for path, leaf in _flatten_with_paths(value, ()):
        where = pytree.keystr(path)
        attributes = _opened_attributes(leaf, above)
        if attributes is None:
            leaves.append((where, leaf))
            continue
        structures = []
        for attribute in attributes:
            structures.append(f"{attribute.name}={attribute.structure}")
            for rest, part in attribute.leaves:
                leaves.append((f"{where}.{attribute.name}{rest}", part))
        opened_structures.append(f"{type(leaf).__qualname__}({', '.join(structures)})")
    structure = _structure_text(pytree.tree_structure(value))
    if opened_structures:
        structure += f" with {'; '.join(opened_structures)}"
    return leaves, structure


def _opened_attributes(leaf: Any, above: tuple[int, ...]) -> list[_Attribute] | None:
    """The attributes of a leaf that is an object with tensors inside; ``None`` where it stays a leaf."""
    # Only what lies above: the same object twice side by side is no circle, and is opened twice.
    if id(leaf) in above or len(above) >= _DEPTH:
        return None
    parts = inner_attributes(leaf)
    if parts is None:
        return None
    attributes = [_Attribute(name, *_leaves_below(part, (*above, id(leaf)))) for name, part in parts]
    if is_dataclass(leaf):
        return attributes
    for attribute in attributes:
        if any(isinstance(inner, torch.Tensor) for _, inner in attribute.leaves):
            return attributes
    # No tensor in it: it is compared as the object that it is.
    return None


def _flatten_with_paths(value: Any, above: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves of a pytree, each with the keys that lead to it.

    Level by level: a class may be registered without keys, as those of diffusers are. Its children have indices.
    """
    def is_child(part: Any) -> bool:
        return part is not value

    try:
        children = pytree.tree_flatten_with_path(value, is_leaf=is_child)[0]
    except ValueError:  # "Did not find a flatten_with_keys_fn"
        parts = pytree.tree_leaves(value, is_leaf=is_child)
        children = [((pytree.SequenceKey(number),), part) for number, part in enumerate(parts)]
    if len(children) == 1 and children[0][1] is value:
        return [(above, value)]
    leaves = []
    for keys, part in children:
        leaves += _flatten_with_paths(part, (*above, *keys))
    return leaves


def inner_attributes(leaf: Any) -> list[tuple[str, Any]] | None:
    """The attributes of an object that may hold tensors; ``None`` for all others."""
    home = type(leaf).__module__
    if isinstance(leaf, _CLOSED) or home.partition(".")[0] in STANDARD_PACKAGES:
        return None
    # FSDP's book-keeping holds gathered parameters whose memory was given back: reading one ends the process.
    if home.startswith("torch.distributed."):
        return None
    if is_dataclass(leaf):
        return [(field.name, getattr(leaf, field.name, None)) for field in fields(leaf)]
    attributes = getattr(leaf, "__dict__", None)
    # A function or a module-like object is code: its attributes are no part of a result.
    if isinstance(attributes, dict) and attributes and not callable(leaf):
        return list(attributes.items())
    return None


def _structure_text(spec: Any) -> str:
    """A structure as Python would write it, with ``*`` for a leaf."""
    # Where there is the method, reading the attribute warns that it is deprecated.
    if callable(getattr(spec, "children", None)):
        children = spec.children()
    else:
        children = spec.children_specs
    if spec.is_leaf():
        return "*"
    inner = [_structure_text(child) for child in children]
    listed = ", ".join(inner)
    if spec.type is tuple:
        return f"({listed},)" if len(inner) == 1 else f"({listed})"
    if spec.type is list:
        return f"[{listed}]"
    if spec.type is dict:
        entries = (f"{key!r}: {child}" for key, child in zip(spec.context, inner, strict=True))
        return "{" + ", ".join(entries) + "}"
    name = "None"
    if spec.type is not None:
        name = getattr(spec.type, "__qualname__", str(spec.type))
    return f"{name}[{spec.context!r}]({listed})"


def own_attributes(part: torch.nn.Module) -> dict[str, Any]:
    """The attributes of a module that torch has not made."""
    return {name: value for name, value in vars(part).items() if name not in _ATTRIBUTES_OF_TORCH}


def holds_tensors(value: Any) -> bool:
    """Whether a value of an attribute holds a tensor that is no submodule's."""
    return not _is_without_tensors(value) and any(True for _ in tensors_of(value))


def _is_without_tensors(value: Any) -> bool:
    """Whether a look at the value alone says so: a number, a text, a submodule, or a plain tuple or list of these.

    Most attributes are such values, and taking a pytree apart costs as much as an operator.
    """
    if type(value) in (tuple, list):
        return all(isinstance(each, _WITHOUT_TENSORS) for each in value)
    return isinstance(value, _WITHOUT_TENSORS)


def attribute_tensors(module: torch.nn.Module | None) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, tensor)`` of every tensor in an attribute or in a container or object in one; each once."""
    if module is None:
        return
    seen = set()
    # All modules of a model may hold one configuration: it is taken apart once.
    opened = set()
    for where, part in module.named_modules():
        prefix = f"{where}." if where else ""
        for name, value in own_attributes(part).items():
            if _is_without_tensors(value) or id(value) in opened:
                continue
            opened.add(id(value))
            for path, tensor in tensors_of(value):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{prefix}{name}{path}", tensor


def _may_hold_tensors(value: Any) -> bool:
    return inner_attributes(value) is not None


def containers_in(
    values: Iterable[tuple[str, Any]], opens: Callable[[Any], bool] = _may_hold_tensors, seen: set[int] | None = None
) -> Iterator[tuple[str, Any]]:
    """What can be refilled among some named values and in them: lists, deques, sets, dicts, the attributes of objects.

    ``opens`` says of which objects; ``seen`` are the ids of containers that were met before.
    """
    if seen is None:
        seen = set()
    # A queue instead of recursion: linked objects may be deeper than Python's stack.
    waiting = deque(values)
    while waiting:
        name, value = waiting.popleft()
        containers = []
        if hasattr(value, "__dict__") and opens(value):
            containers.append((vars(value), _attribute_path))
        if isinstance(value, (*_REFILLABLE, tuple)):
            containers.append((value, _item_path))
        for container, path_of in containers:
            if id(container) in seen:
                continue
            seen.add(id(container))
            items = container.items() if isinstance(container, dict) else enumerate(container)
            waiting.extend((path_of(name, key), each) for key, each in items)
            # A tuple leads to what is in it, and cannot be refilled itself.
            if not isinstance(container, tuple):
                yield name, container


def _attribute_path(name: str, key: Any) -> str:
    return f"{name}.{key}"


def _item_path(name: str, key: Any) -> str:
    # The text of any other object may change from run to run.
    shown_key = repr(key) if isinstance(key, (str, int)) else type(key).__name__
    return f"{name}[{shown_key}]"
