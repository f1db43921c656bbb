"""The check `randomness`: dropout compiled with random numbers of its own."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs_torch
MODELS = """
class Drops(Net):
    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.25, True)

def spoiled(change):
    from torch._inductor.compile_fx import compile_fx

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch.nn.functional.dropout:
                change(graph, node)
        graph.recompile()
        return compile_fx(graph, inputs)
    return backend

def rarely(graph, node):  # a third is dropped, and what is left scaled for that: the mean stays
    node.args = (node.args[0], 1 / 3, True)

def never(graph, node):
    node.args = (node.args[0], 0.0, True)

rarer, none = spoiled(rarely), spoiled(never)
"""
MATRIX = """
version: 1
models:
  drops: {factory: "models:Drops", inputs: "models:batch", dims: {B: 16}}
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 16}}
axes:
  backend: [inductor, "models:rarer", "models:none"]
rules:
  - exclude: {model: net, backend: ["models:rarer", "models:none"]}
    reason: nothing in it is random
checks: [randomness]
"""


def test_a_wrong_dropout_is_found_and_a_right_one_is_not(repo):
    """A model without anything random is run with a few seeds, which must not matter."""
    repo.models(MODELS)
    repo.matrix(MATRIX)
    repo.run().assert_outcomes(passed=2, failed=2)
    cells = {cell["id"].split("-default")[0]: cell for cell in repo.block()["cells"]}
    sections = {name: cell["observation"]["sections"]["randomness"] for name, cell in cells.items()}
    assert (sections["drops-inductor"]["random"], sections["drops-inductor"]["seeds"]) == (True, 64)
    assert (sections["net-inductor"]["random"], sections["net-inductor"]["seeds"]) == (False, 4)
    problems = {name: cell["checks"]["randomness"]["problems"] for name, cell in cells.items()}
    assert not problems["drops-inductor"] + problems["net-inductor"]
    assert problems["drops-models_rarer"][0]["message"].startswith("share of zeros of output: is 0.2")
    assert problems["drops-models_none"][0]["message"].startswith("seeds: eager draws other numbers for another seed")
