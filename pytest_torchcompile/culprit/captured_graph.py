"""Captured graphs: what Dynamo hands to a backend, with the inputs that it really ran on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.lowering.places import place_of_stack

__all__ = ["CapturedGraph", "GraphCatcher", "graph_size", "places_of"]


@dataclass(frozen=True)
class CapturedGraph:
    """A graph that can be run by itself: parameters and buffers are inputs too."""

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    """Copies, each a leaf of the autograd graph; those that share memory still do."""
    grad: bool
    """Did it run with gradients?"""


class GraphCatcher:
    """A backend for ``torch.compile`` that runs graphs as they are; it keeps each with the inputs of its first call.

    ``latest``: with those of its last call instead.
    """

    def __init__(self, latest: bool = False) -> None:
        self.graphs: list[CapturedGraph] = []
        self._latest = latest

    def __call__(self, module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        """Compile one graph, as Dynamo calls it."""
        place = len(self.graphs)
        seen: list[bool] = []

        def run(*arguments: Any) -> Any:
            if not seen or self._latest:
                grad = torch.is_grad_enabled()
                lifted, values = _with_tensors_as_inputs(module, arguments)
                if seen:
                    del self.graphs[place]
                seen.append(True)
                self.graphs.insert(place, CapturedGraph(lifted, leaf_copies(values), grad))
            return module(*arguments)

        return run


def leaf_copies(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies with the same values, strides and shared memory, cut off from what made them."""
    with torch.no_grad():
        copied = Batch.of((values, {})).clone().args
    leaves: list[Any] = []
    for value, original in zip(copied, values, strict=True):
        leaf = value
        if isinstance(value, torch.Tensor):
            leaf = value.detach().requires_grad_(original.requires_grad)
        leaves.append(leaf)
    return tuple(leaves)


def _with_tensors_as_inputs(module: fx.GraphModule, arguments: tuple[Any, ...]) -> tuple[fx.GraphModule,
                                                                                         tuple[Any, ...]]:
    """A copy of the graph in which tensors that it keeps are inputs as well, and the inputs it then takes."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copied[node] = graph.node_copy(node, copied.__getitem__)
    values = list(arguments)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for node in list(graph.nodes):
        value = _kept_tensor(module, node)
        if value is None:
            continue
        place = graph.inserting_after(last[0]) if last else graph.inserting_before(next(iter(graph.nodes)))
        with place:
            added = graph.placeholder(node.name)
        node.replace_all_uses_with(added)
        graph.erase_node(node)
        values.append(value)
        last = [added]
    graph.lint()
    return fx.GraphModule(module, graph), tuple(values)


def _kept_tensor(module: fx.GraphModule, node: fx.Node) -> torch.Tensor | None:
    if node.op != "get_attr":
        return None
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, torch.Tensor) else None


def graph_size(module: fx.GraphModule) -> int:
    """How many operators it calls."""
    return sum(node.op in ("call_function", "call_method", "call_module") for node in module.graph.nodes)


def places_of(module: fx.GraphModule) -> list[str]:
    """``file:line`` in the user's code of each operator, in order, each once."""
    places: dict[str, None] = {}
    for node in module.graph.nodes:
        if node.op.startswith("call_") and (place := place_of_stack(node.meta.get("stack_trace") or "")):
            places[place] = None
    return list(places)
