"""The pass ``constant_folding``: what depends on no input of a graph is computed once, when the graph is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import torch
from torch import fx

from pytest_torchcompile.state.random_operators import node_draws

__all__ = ["constant_folding", "real_tensors"]

_LARGEST: Final = 1 << 16
"""Elements of a constant that is worth keeping; a larger one would cost memory for as long as the code lives."""
_LIFT: Final = torch.ops.aten.lift_fresh_copy.default


def constant_folding(module: fx.GraphModule) -> None:
    """Compute once what depends on no input. Not what draws random numbers, nor memory that the caller gets."""
    handed_out = _handed_out(module)
    values: dict[fx.Node, torch.Tensor] = {}
    for node in module.graph.nodes:
        value = _constant_value(module, node, values)
        if value is not None:
            values[node] = value
    number = 0
    for node, value in values.items():
        # A tensor that is merely made (arange, full) is cheaper to make than to load.
        computed = node.op == "call_function" and node.all_input_nodes and node.target is not _LIFT
        inside = all(user in values for user in node.users)
        if not computed or inside or node in handed_out:
            continue
        while hasattr(module, f"_folded_constant{number}"):
            number += 1
        module.register_buffer(f"_folded_constant{number}", value)
        with module.graph.inserting_before(node):
            held = module.graph.get_attr(f"_folded_constant{number}")
            # As torch writes constants: only here may a real tensor meet fake ones, and each call has its own copy.
            constant = module.graph.call_function(_LIFT, (held,))
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
    # Users first, so that a whole chain goes.
    for node in reversed(values):
        if not node.users:
            module.graph.erase_node(node)


def _constant_value(module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """What a node always gives; None if that is not known, or not safe to keep."""
    if node.op == "get_attr":
        held = getattr(module, str(node.target), None)
        return held if type(held) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) else None
    if not _is_pure(node) or not all(each in values for each in node.all_input_nodes):
        return None
    told = node.meta.get("val")
    if not isinstance(told, torch.Tensor) or not all(type(size) is int for size in told.shape):
        return None
    if told.numel() > _LARGEST:
        return None
    with real_tensors():
        arguments = fx.node.map_arg(node.args, values.__getitem__)
        value = node.target(*arguments, **fx.node.map_arg(node.kwargs, values.__getitem__))  # type: ignore[operator]
        if not isinstance(value, torch.Tensor):
            return None
        # A view would hold what it is of.
        value = value.clone(memory_format=torch.preserve_format)
    described = (told.shape, told.stride(), told.dtype, told.device)
    return value if (value.shape, value.stride(), value.dtype, value.device) == described else None


def _is_pure(node: fx.Node) -> bool:
    """Whether the same arguments always give the same, and nothing else happens."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace not in ("aten", "prims") or node.target._schema.is_mutable:
        return False
    # What is in empty memory is anyone's guess.
    return not node_draws(node) and "empty" not in str(node.target)


def _handed_out(module: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose memory the caller gets, or an operator writes to: results that share memory have to go on sharing."""
    found: set[fx.Node] = set(module.graph.find_nodes(op="output")[0].all_input_nodes)
    for node in reversed(module.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        schema = node.target._schema
        is_view = node in found and any(each.alias_info is not None for each in schema.arguments)
        if is_view or schema.is_mutable:
            found.update(node.all_input_nodes)
    return found


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """No fake tensors, no tracing, no gradients.

    Private: ``torch.utils._python_dispatch._disable_current_modes`` (torch 2.8 to 2.15; 2.13 tried).
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad():
        yield


