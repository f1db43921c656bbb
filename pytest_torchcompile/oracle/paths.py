"""The leaves of any structure, each with the path that a user would write to reach it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from torch.utils import _pytree as pytree

__all__ = ["leaves_of"]


def leaves_of(value: Any) -> tuple[list[tuple[str, Any]], str]:
    """Return ``[(path, leaf)]`` and a text that is equal for equal structures.

    Any pytree (so also what transformers registers) and dataclasses that nobody registered, at any depth.
    Uses ``torch.utils._pytree.tree_flatten_with_path`` and ``keystr`` (torch 2.2 to 2.13).
    """
    found, spec = pytree.tree_flatten_with_path(value)
    leaves: list[tuple[str, Any]] = []
    inner: list[str] = []
    for path, leaf in found:
        where = pytree.keystr(path)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            parts = [(f".{f.name}", *leaves_of(getattr(leaf, f.name))) for f in fields(leaf)]
            leaves += [(where + name + rest, part) for name, below, _ in parts for rest, part in below]
            named = ", ".join(f"{name[1:]}={text}" for name, _, text in parts)
            inner.append(f"{type(leaf).__qualname__}({named})")
        else:
            leaves.append((where, leaf))
    text = _shown(spec)
    return leaves, text + (f" with {'; '.join(inner)}" if inner else "")


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
