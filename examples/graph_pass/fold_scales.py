"""A graph pass: two multiplications by numbers become one. And a backend that runs it, under a name for torch.compile.

``(x * 3) * 0.5`` becomes ``x * 1.5``. That rounds once where the program rounded twice, so results differ in the last
bit: the oracle measures how much rounding the program itself has, and takes less than that for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

TIMES = torch.ops.aten.mul.Tensor


def fold_scales(graph_module: GraphModule) -> GraphModule:
    """Rewrite each product of a product with numbers that nobody else uses."""
    for node in list(graph_module.graph.nodes):
        if not is_scaled(node):
            continue
        inner = node.args[0]
        if is_scaled(inner) and len(inner.users) == 1:
            node.args = (inner.args[0], inner.args[1] * node.args[1])
            graph_module.graph.erase_node(inner)
    graph_module.recompile()
    return graph_module


def is_scaled(node: Any) -> bool:
    """Whether it multiplies a tensor by a number."""
    return isinstance(node, Node) and node.target is TIMES and isinstance(node.args[1], (int, float))


def folding(graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """A backend of torch.compile: aot_eager with the pass in its forward and backward graphs."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compile_graph(inner: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return make_boxed_func(fold_scales(inner).forward)

    return aot_autograd(fw_compiler=compile_graph)(graph_module, example_inputs)


class Scaled(torch.nn.Module):
    """A model with something to fold, once in each direction."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Also with a product that two use, which must stay."""
        scaled = self.inner(x) * 3
        return (scaled * 0.5).tanh() + scaled


def vectors(B: int) -> torch.Tensor:
    """One batch."""
    return torch.randn(B, 8)
