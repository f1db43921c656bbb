"""A second capture of a graph, with other decompositions or without any, to hold an explanation against."""

from __future__ import annotations

from collections import Counter

from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


def without_code(decompositions):
    """A backend that traces with these decompositions, and generates no code."""
    def run(graph, inputs):
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=run, bw_compiler=run, decompositions=decompositions)


def operators_of(stage):
    """ATen operators of a graph, and how often."""
    calls = [node for node in stage.nodes if node.target not in ("input", "expression")]
    return Counter(node.target.removeprefix("torch.ops.") for node in calls)
