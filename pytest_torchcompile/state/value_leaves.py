"""What is inside of a value: its leaves, each with the path that a user would write to reach it; the containers that
can be refilled; the tensors that modules hold outside of their parameters and buffers.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = [
    "STANDARD_PACKAGES", "attribute_tensors", "containers_in", "holds_tensors", "inner_attributes", "leaves_of",
    "own_attributes", "tensors_of",
]

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
