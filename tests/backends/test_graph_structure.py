"""The structure of a graph: what it computes from what, not how its nodes are called."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_torchcompile.backends.graph_structure import structure_of

pytestmark = pytest.mark.needs_torch


def graph(name="x", operation=torch.add, other=1, constant=1.0, constant_name="factor"):
    """``operation(x, other) * constant``."""
    module = torch.nn.Module()
    module.register_buffer(constant_name, torch.full((), constant))
    made = fx.Graph()
    x = made.placeholder(name)
    done = made.call_function(operation, (x, other), name=f"{name}_done")
    made.output((made.call_function(torch.mul, (done, made.get_attr(constant_name))),))
    return fx.GraphModule(module, made)


def test_names_say_nothing():
    """Neither of nodes nor of constants."""
    assert structure_of(graph()) == structure_of(graph("y", constant_name="other_factor"))


@pytest.mark.parametrize("changed", [{"operation": torch.sub}, {"operation": operator.add}, {"other": 2},
                                     {"constant": 2.0}])
def test_what_is_computed_counts(changed):
    """The operator, its arguments, the value of a constant."""
    assert structure_of(graph(**changed)) != structure_of(graph())


def test_which_result_is_taken_counts():
    """The same operators, and another of their results."""
    module = graph()
    first = structure_of(module)
    module.graph.output_node().args = ((module.graph.find_nodes(op="call_function", target=torch.add)[0],),)
    assert structure_of(module) != first


def test_constants_are_read_while_torch_traces():
    """With fake tensors around."""
    expected = structure_of(graph())
    made = graph()
    with FakeTensorMode():
        assert structure_of(made) == expected
