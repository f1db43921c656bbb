"""Graphs within graphs: an autograd function of the user's own, and the branches of ``torch.cond``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile.explain import explain
from pytest_torchcompile.explain.files import write_files
from pytest_torchcompile.explain.graph_drawing import export_text
from pytest_torchcompile.explain.graph_texts import Stage, read_graph, saved_tensors
from pytest_torchcompile.explain.roofline import flops_of_stage

pytestmark = pytest.mark.needs_torch

GRAPH = '''class <lambda>(torch.nn.Module):
    def forward(self, x: "f32[4, 8]", mul: "f32[8, 8]", dim: "f32[4]", tanh: "f32[4]"):
        body_0 = self.body_0
        called = torch.ops.higher_order.cond(x, body_0, (mul,));  body_0 = None
        sum_1: "f32[4]" = torch.ops.aten.mul.Tensor(x, dim = 1);  x = None
        gelu: "f32[4]" = torch.ops.aten.gelu.default(sum_1, approximate = 'tanh')
        return (gelu,)

    class body_0(torch.nn.Module):
        def forward(self, x: "f32[2, 3]", y: "f32[3, 5]"):
            # File: net.py:7 in forward, code: return x @ y
            _set = torch._C._set(False);  _set = None
            mm: "f32[2, 5]" = torch.ops.aten.mm.default(x, y)
            return (mm,)

        class inner(torch.nn.Module):
            def forward(self, x: "f32[1]"):
                sum_1: "f32[1]" = torch.ops.aten.sin.default(x)
                return (sum_1,)

    class body_1(torch.nn.Module):
        def forward(self, x: "f32[7, 3]", y: "f32[3, 5]"):
            _set = torch._C._set(False);  _set = None
            mm: "f32[7, 5]" = torch.ops.aten.mm.default(x, y)
            return (mm,)
'''


def test_names_of_subgraphs_are_their_own():
    nodes = {node.name: node for node in read_graph(GRAPH)}
    assert [name for name in nodes if name.endswith("x")] == ["x", "body_0.x", "body_0.inner.x", "body_1.x"]
    assert nodes["x"].type == "f32[4, 8]"
    assert nodes["body_1.mm"].inputs == ("body_1.x", "body_1.y")
    assert nodes["body_0.inner.sum_1"].inputs == ("body_0.inner.x",)
    assert (nodes["sum_1"].body, nodes["body_0.inner.sum_1"].body) == ("", "body_0.inner")
    # In another body it would be taken for its own input.
    assert nodes["body_1._set"].inputs == ()


def test_operators_keywords_and_texts_are_no_inputs():
    """``mul`` of ``aten.mul``, ``dim = 1`` and ``'tanh'`` have the names of inputs."""
    nodes = {node.name: node for node in read_graph(GRAPH)}
    assert nodes["sum_1"].inputs == ("x",)
    assert nodes["gelu"].inputs == ("sum_1",)
    assert nodes["called"].inputs == ("x", "mul")


def test_flops_of_equal_names_are_told_apart():
    found = flops_of_stage(Stage("0/0", "forward", 0, GRAPH, tuple(read_graph(GRAPH))))
    assert found == {"body_0.mm": 2 * 2 * 3 * 5, "body_1.mm": 2 * 7 * 3 * 5}


def test_what_subgraphs_are_given_and_return_is_not_the_graphs():
    nodes = tuple(read_graph(GRAPH))
    assert [tensor.name for tensor in saved_tensors((), nodes)] == ["x", "mul", "dim", "tanh"]
    text = export_text(Stage("0/0", "forward", 0, GRAPH, nodes), None)
    assert text.partition("# inputs")[2].split("\n") == [
        "", "    x: INPUT f32[4, 8]", "    mul: INPUT f32[8, 8]", "    dim: INPUT f32[4]", "    tanh: INPUT f32[4]",
        "    # outputs", "    gelu: OUTPUT f32[4]", ""]


class Square(torch.autograd.Function):
    """Forward and backward are graphs of their own within Dynamo's."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * gradient * x


class Squared(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return Square.apply(self.linear(x))


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated")
def test_an_autograd_function_is_explained_and_drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    explained = explain(Squared(), torch.randn(4, 8), name="squared")
    assert not explained.error
    (dynamo,) = [stage for stage in explained.stages if stage.stage == "dynamo"]
    for node in dynamo.nodes:
        assert node.name not in node.inputs
    assert {node.body for node in dynamo.nodes} == {"", "fwd_body_0", "bwd_body_0"}
    write_files(explained, tmp_path / "files")
    assert list(tmp_path.glob("files/graphs/*dynamo*.svg"))
