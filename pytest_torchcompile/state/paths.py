"""The leaves of any structure, each with the path that a user would write to reach it."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["STANDARD", "leaves_of", "opened", "tensors_of"]

_CLOSED = (torch.nn.Module, torch.Tensor, ModuleType, type, enum.Enum, torch.Generator, torch.dtype, torch.device)
STANDARD = sys.stdlib_module_names - {"argparse", "collections", "types"}
"""Packages whose objects (loggers, threads, files) belong to the process, and lead to everything in it."""
_DEPTH = 6
"""Objects inside objects are opened so deep."""


def leaves_of(value: Any) -> tuple[list[tuple[str, Any]], str]:
    """Return ``[(path, leaf)]`` and a text that is equal for equal structures.

    Any pytree (so also what transformers registers), dataclasses that nobody registered, and other objects that
    hold tensors in attributes (a cache, a distribution), at any depth. A leaf is a tensor or a Python object.
    Uses ``torch.utils._pytree.tree_flatten_with_path`` and ``keystr`` (torch 2.2 to 2.15).
    """
    return _leaves(value, ())


def tensors_of(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Only the leaves that are tensors."""
    yield from ((path, leaf) for path, leaf in leaves_of(value)[0] if isinstance(leaf, torch.Tensor))


def _leaves(value: Any, above: tuple[int, ...]) -> tuple[list[tuple[str, Any]], str]:
    found, spec = _with_paths(value, ()), pytree.tree_structure(value)
    leaves: list[tuple[str, Any]] = []
    inner: list[str] = []
    for path, leaf in found:
        where = pytree.keystr(path)
        parts = None if id(leaf) in above or len(above) >= _DEPTH else opened(leaf)
        if parts is None:
            leaves.append((where, leaf))
            continue
        inside = [(name, *_leaves(part, (*above, id(leaf)))) for name, part in parts]
        if not is_dataclass(leaf) and not any(isinstance(x, torch.Tensor) for _, below, _ in inside for _, x in below):
            leaves.append((where, leaf))  # no tensor in it: compared as the object that it is
            continue
        leaves += [(f"{where}.{name}{rest}", part) for name, below, _ in inside for rest, part in below]
        inner.append(f"{type(leaf).__qualname__}({', '.join(f'{name}={text}' for name, _, text in inside)})")
    text = _shown(spec)
    return leaves, text + (f" with {'; '.join(inner)}" if inner else "")


def _with_paths(value: Any, above: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Any]]:
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
    return [found for keys, part in children for found in _with_paths(part, (*above, *keys))]


def opened(leaf: Any) -> list[tuple[str, Any]] | None:
    """The attributes of an object that may hold tensors; ``None`` for all others."""
    home = type(leaf).__module__
    # FSDP's book-keeping holds gathered parameters whose memory was given back: reading one ends the process.
    if isinstance(leaf, _CLOSED) or home.partition(".")[0] in STANDARD or home.startswith("torch.distributed."):
        return None
    if is_dataclass(leaf):
        return [(field.name, getattr(leaf, field.name, None)) for field in fields(leaf)]
    held = getattr(leaf, "__dict__", None)
    return list(held.items()) if isinstance(held, dict) and held and not callable(leaf) else None


def _shown(spec: Any) -> str:
    """A structure as Python would write it, with ``*`` for a leaf."""
    children = spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs
    if spec.is_leaf():
        return "*"
    inner = [_shown(child) for child in children]
    if spec.type is tuple:
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    if spec.type is list:
        return f"[{', '.join(inner)}]"
    if spec.type is dict:
        entries = (f"{key!r}: {child}" for key, child in zip(spec.context, inner, strict=True))
        return "{" + ", ".join(entries) + "}"
    name = getattr(spec.type, "__qualname__", str(spec.type)) if spec.type is not None else "None"
    return f"{name}[{spec.context!r}]({', '.join(inner)})"
