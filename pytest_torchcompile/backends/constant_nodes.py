"""Constants of a graph: the pass ``constant_folding``, which computes once what depends on no input, and those that
other passes put in.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from typing import Any, Final

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.state.random_operators import node_draws

__all__ = ["NO_VALUES", "constant_folding", "lift_constants", "real_tensors"]

_LARGEST: Final = 1 << 16
"""Elements of a constant that is worth keeping; a larger one would cost memory for as long as the code lives."""
_LIFT: Final = torch.ops.aten.lift_fresh_copy.default
"""The operator by which torch takes a constant into a graph: a copy for each call."""

NO_VALUES: Final = (
    "a pass runs in torch's fake mode, and a tensor that it makes or reads there has no values: make it outside of the "
    "pass, or inside of `with real_tensors():` of pytest_torchcompile.backends.constant_nodes, or by an operator such "
    "as aten.full")
"""What is to be known of a fake tensor."""


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


def lift_constants(module: fx.GraphModule, known: Collection[str], mode: FakeTensorMode | None, told: str) -> None:
    """Write the constants that a pass has put into a graph as torch writes its own, with a note of their value.

    Args:
        module: The graph that the pass has left.
        known: What the ``get_attr`` nodes of the graph before it read.
        mode: The fake mode of the graph's inputs.
        told: How the pass is spoken of.

    Raises:
        UsageError: a constant is fake, or missing in the module, or a tensor stands among the arguments of an operator.
    """
    for node in list(module.graph.nodes):
        arguments = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
        if any(isinstance(each, torch.Tensor) for each in arguments):
            raise UsageError(f"{told} gave {node.name} a tensor for an argument; put it into the graph as a node: "
                             "module.register_buffer(name, tensor), then graph.get_attr(name)")
        if node.op == "get_attr" and str(node.target) not in known:
            _lift_constant(module, node, mode, told)


def _lift_constant(module: fx.GraphModule, node: fx.Node, mode: FakeTensorMode | None, told: str) -> None:
    """Only behind this operator may a real tensor meet fake ones, and each call has its own copy."""
    try:
        held: Any = functools.reduce(getattr, str(node.target).split("."), module)
    except AttributeError:
        raise UsageError(f"{told} left the node {node.name}, which reads {node.target!r}, and the module has no such "
                         f"attribute; write module.register_buffer({str(node.target)!r}, tensor)") from None
    # It may be a graph of its own, of torch.cond say.
    if not isinstance(held, torch.Tensor):
        return
    if isinstance(held, FakeTensor):
        raise UsageError(f"{told} has put a fake tensor into the graph, {str(node.target)!r}; {NO_VALUES}")
    node.meta["val"] = held if mode is None else mode.from_tensor(held, static_shapes=True)
    if all(user.target is _LIFT for user in node.users):
        return
    with module.graph.inserting_after(node):
        lifted = module.graph.call_function(_LIFT, (node,))
    lifted.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(lifted, delete_user_cb=lambda user: user is not lifted)


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
    """No fake tensors, no tracing, no gradients: a tensor that a pass makes inside of it has values.

    Private: ``torch.utils._python_dispatch._disable_current_modes`` (torch 2.8 to 2.15; 2.13 tried).
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad():
        yield


