"""The pass does what it says. The oracle finds no difference but rounding, and does not miss a wrong pass."""

from __future__ import annotations

import fold_scales
import pytest
import torch
from fold_scales import Scaled, folding, vectors
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_torchcompile import CompileConfig, compare


def test_two_products_become_one():
    """Looked at in the graph: this is what the oracle cannot tell."""
    graph = make_fx(lambda x: (x * 3) * 0.5)(torch.ones(2))
    folded = fold_scales.fold_scales(graph)
    assert [node.args[1] for node in folded.graph.nodes if node.op == "call_function"] == [1.5]


def test_results_and_gradients_stay():
    found = compare(Scaled(), [vectors(4), vectors(6)], CompileConfig(enabled=True, backend=folding))
    assert found.ok, found.problems


def test_a_wrong_pass_is_found(monkeypatch):
    """It forgets the numbers."""
    monkeypatch.setattr(fold_scales, "fold_scales", forget_the_number)
    found = compare(Scaled(), [vectors(4)], CompileConfig(enabled=True, backend=folding))
    assert "value" in {problem.kind for problem in found.problems}


def forget_the_number(graph_module):
    for node in graph_module.graph.nodes:
        if fold_scales.is_scaled(node):
            node.args = (node.args[0], 1)
    graph_module.recompile()
    return graph_module


@pytest.fixture
def model():
    return Scaled()


@pytest.mark.compile_modes("default", backend=["aot_eager"])
def test_without_the_pass(compiled_model, recompile_counter):
    """The model itself compiles as one graph: what fails with the pass is of the pass."""
    compiled_model(vectors(4))
    assert recompile_counter.count == 0


@pytest.mark.graph_passes(["common_subexpressions", fold_scales.fold_scales])
def test_the_pass_on_whole_graphs(graph_pass):
    """Forward and backward as one graph; each pass is held against the graph before it."""
    judged = graph_pass.judge(Scaled(), vectors(4), vectors(6))
    assert judged.ok, judged


@pytest.mark.graph_passes([forget_the_number])
def test_a_wrong_pass_is_named(graph_pass):
    """With its number, and what it has changed."""
    judged = graph_pass.judge(Scaled(), vectors(4))
    assert judged.problems[0].startswith("pass 1 of 1 (forget_the_number) changed output")
