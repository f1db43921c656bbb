"""The structure of a graph: what it calls on what, whatever its nodes are called."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import torch
from torch import fx

from pytest_torchcompile.backends.constant_nodes import real_tensors

__all__ = ["structure_of"]

# Elements of a constant that are looked at.
_LARGEST: Final = 1 << 20


def structure_of(module: fx.GraphModule) -> str:
    """A digest that two graphs have in common if they call the same operators on the same values, in the same order.

    Names of nodes say nothing. Constants count by their values, up to a million elements each.
    """
    digest = hashlib.sha256()
    place: dict[fx.Node, str] = {}
    for number, node in enumerate(module.graph.nodes):
        place[node] = f"%{number}"
        args, kwargs = fx.map_arg((node.args, node.kwargs), place.__getitem__)
        digest.update(f"{node.op} {_called(module, node)} {args!r} {kwargs!r}\n".encode())
    return digest.hexdigest()


def _called(module: fx.GraphModule, node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return ""
    if node.op == "get_attr":
        return _constant(module, str(node.target))
    if isinstance(node.target, str):
        return node.target
    # The text of a plain function has its address.
    name = getattr(node.target, "__qualname__", None)
    if name is not None and not isinstance(node.target, torch._ops.OpOverload):
        return f"{getattr(node.target, '__module__', '')}.{name}"
    return str(node.target)


def _constant(module: fx.GraphModule, path: str) -> str:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    if isinstance(value, fx.GraphModule):
        return structure_of(value)
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    text = f"{value.dtype} {tuple(value.shape)}"
    # Neither fake nor distributed tensors have values that could be read here.
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel() <= _LARGEST:
        # It is read while torch traces with fake tensors.
        with real_tensors():
            values = value.detach().cpu().flatten().tolist()
        text += f" {hashlib.sha256(repr(values).encode()).hexdigest()}"
    return text
