"""Names: parameters and buffers in the descriptors of a joint graph."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from torch import fx

__all__ = ["name_parameters"]

# How Dynamo names where an input comes from: L['self']._modules['blocks']._modules['0']._parameters['weight'].
_STEP: Final = re.compile(r"\._(modules|parameters|buffers)\['([^']+)'\]")


def name_parameters(joint: fx.GraphModule, captured: fx.GraphModule) -> None:
    """Write the names of parameters and buffers into the descriptors of a joint graph.

    Dynamo has made arguments of them; where each comes from stands on its placeholder (``_dynamo_source``, or
    ``grapharg``; torch 2.9 to 2.15, 2.13 tried). Where it does not, the argument keeps its number.
    """
    from torch._functorch._aot_autograd.descriptors import BufferAOTInput, ParamAOTInput, PlainAOTInput

    named: dict[Any, Any] = {}
    for index, node in enumerate(captured.graph.find_nodes(op="placeholder")):
        steps = _STEP.findall(_source_of(node))
        if not steps or steps[-1][0] == "modules":
            continue
        name = ".".join(step for _, step in steps)
        kind = ParamAOTInput if steps[-1][0] == "parameters" else BufferAOTInput
        named[PlainAOTInput(index)] = kind(name)

    def with_name(descriptor: Any) -> Any:
        """The descriptor of a parameter, of its gradient, of its new value, or of a ``DTensor``'s part of one of them.
        """
        if descriptor in named:
            return named[descriptor]
        for attribute in ("grad_of", "mutated_input", "base"):
            inner = getattr(descriptor, attribute, None)
            if inner is not None:
                return replace(descriptor, **{attribute: with_name(inner)})
        return descriptor

    for node in joint.graph.nodes:
        if node.op == "placeholder":
            node.meta["desc"] = with_name(node.meta.get("desc"))
        elif node.op == "output" and isinstance(node.meta.get("desc"), (list, tuple)):
            node.meta["desc"] = [with_name(each) for each in node.meta["desc"]]


def _source_of(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    # A method in older versions, a property in newer ones.
    return str(name() if callable(name) else name)
