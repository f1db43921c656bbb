"""Graphs within graphs: an autograd function of the user's own, and the branches of ``torch.cond``."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pytest_torchcompile.checks.kernels import _add_calls
from pytest_torchcompile.explain import explain
from pytest_torchcompile.explain.explanation import calls_text
from pytest_torchcompile.explain.explanation_text import explanation_lines
from pytest_torchcompile.explain.files import write_files
from pytest_torchcompile.explain.graph_drawing import export_text
from pytest_torchcompile.explain.graph_texts import Stage, read_graph, saved_tensors
from pytest_torchcompile.explain.page import explanation_page
from pytest_torchcompile.explain.roofline import flops_of_stage, kernel_roofs
from pytest_torchcompile.gauges.kernels import Kernels
from pytest_torchcompile.gauges.machine_peaks import MachinePeaks
from pytest_torchcompile.lowering.kernel_records import KernelCall, Operator, calls_that_move, subgraph_text

pytestmark = pytest.mark.needs_torch
PEAKS = MachinePeaks("cpu", bandwidth=1e9, call_seconds=1e-6, products={"float32": 1e10})

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


class Branches(nn.Module):
    """Each branch has two operators, and an operator of the graph itself decides."""

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda z: z.sin() + 1, lambda z: z.cos() * 2, (x,))


def test_kernels_of_branches_are_told_from_those_that_run():
    with torch.no_grad():
        explained = explain(Branches(), torch.randn(4, 8), name="branches")
    branches = {kernel.subgraph: kernel for kernel in explained.kernels if kernel.in_branch}
    operators = {name: [operator.node for operator in kernel.operators] for name, kernel in branches.items()}
    assert operators == {"true_graph_0": ["true_graph_0.sin", "true_graph_0.add"],
                         "false_graph_0": ["false_graph_0.cos", "false_graph_0.mul"]}
    for kernel in branches.values():
        assert (kernel.bytes_read, kernel.bytes_written, kernel.bytes_kept_inside) == (128, 128, 128)
    # The nodes are those of the graph as it was read.
    (graph,) = [stage for stage in explained.stages if stage.stage == "post_grad"]
    assert {node for nodes in operators.values() for node in nodes} < {node.name for node in graph.nodes}
    text = "\n".join(explanation_lines(explained))
    assert text.startswith("branches: 1 frame, 1 generated graph, 2 kernel calls and 2 in branches of which one runs; ")
    # A sum and what it is compared with, and the call of the branch that runs, with what that is given and returns.
    assert "257 B read, 133 B written, 0 B never reach memory" in text
    assert "pointwise; in true_graph_0, one of the branches of which one runs; loops over 32" in text
    assert "reads     nothing" not in text
    assert "one of the branches of which one runs" in str(explanation_page(explained))
    assert [roof.name for roof in kernel_roofs(explained, PEAKS)] == [
        kernel.name for kernel in explained.kernels if not kernel.in_branch]


def test_branches_are_no_part_of_a_reports_sum():
    """The call of them is, with what it is given and returns."""
    with torch.no_grad():
        explained = explain(Branches(), torch.randn(4, 8))
    graphs = [Kernels("0/0", "inference").to_dict()]
    watch = SimpleNamespace(calls=lambda texts: explained.kernels)
    _add_calls(graphs, SimpleNamespace(kernel_watch=watch, texts=[]))
    counted = {call["where"]: call["counted"] for call in graphs[0]["calls"]}
    assert counted == {"": True, "in true_graph_0, one of the branches of which one runs": False,
                       "in false_graph_0, one of the branches of which one runs": False}
    (call,) = [call for call in graphs[0]["calls"] if call["kind"] == "extern"]
    assert [tensor["bytes"] for tensor in call["writes"]] == [4 * 8 * 4]


def test_a_subgraph_that_always_runs_has_its_bytes_once():
    """Its kernels stand for its call; of branches the call stands."""
    called = KernelCall("f", "pointwise", "0/0", 0, subgraph="body", called_by=("invoke_subgraph",))
    branch = replace(called, subgraph="true_graph_0", called_by=("cond",))
    calls = {}
    for target in ("invoke_subgraph", "cond"):
        operator = Operator(target, target, target, (4,), "float32", 16)
        calls[target] = KernelCall(target, "extern", "0/0", 0, operators=(operator,))
    assert calls_that_move([called, branch, *calls.values()]) == [called, calls["cond"]]
    assert calls_text([called, branch]) == "1 kernel call and 1 in branches of which one runs"
    assert subgraph_text(called) == "in the subgraph body of invoke_subgraph"
    assert subgraph_text(calls["cond"]) == ""


class Products(nn.Module):
    """Two multiplications of the user's, and nothing that was taken apart."""

    def forward(self, x):
        return x * 2 * x + 1


def test_operators_of_one_name_are_counted():
    """In brackets is what one was decomposed into."""
    with torch.no_grad():
        text = "\n".join(explanation_lines(explain(Products(), torch.randn(4, 8))))
    assert "operators mul x 2, add" in text
