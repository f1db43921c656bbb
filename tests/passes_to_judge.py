"""Graph passes that are right, one that bakes a size, and a model whose answer is given: for tests of judged passes."""

from __future__ import annotations

import torch
from torch import nn

aten = torch.ops.aten


class Answers(nn.Module):
    """What it is told to: zeros, NaN, an error in some calls or in all."""

    def __init__(self, answer):
        super().__init__()
        self.up, self.answer = nn.Linear(6, 4), answer

    def forward(self, x):
        return self.answer(self.up(x) * 2)


def another_order(module):
    """a + b as b + a: right."""
    for node in module.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        node.args = node.args[::-1]


def twice_as_sum(module):
    """x * 2 as x + x: right, bit for bit."""
    for node in module.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        if node.args[1] == 2:
            node.target, node.args = aten.add.Tensor, (node.args[0], node.args[0])


def only_eight_rows(x):
    """Refuses the second of two sizes."""
    return x.view(8, 4)


def size_of_this_call(module):
    """x * 2 as x * 2 * rows / (rows of this call)."""
    sizes = [node for node in module.graph.find_nodes(op="placeholder") if isinstance(node.meta["val"], torch.SymInt)]
    for node in module.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        if sizes and node.args[1] == 2:
            rows = sizes[0].meta["val"].node.hint
            with module.graph.inserting_after(node):
                larger = module.graph.call_function(aten.mul.Tensor, (node, sizes[0]))
            with module.graph.inserting_after(larger):
                scaled = module.graph.call_function(aten.mul.Tensor, (larger, 1 / rows))
            added = (larger, scaled)
            node.replace_all_uses_with(scaled, delete_user_cb=lambda user, added=added: user not in added)
