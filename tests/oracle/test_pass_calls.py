"""The calls by which passes are judged: other values for all that a model holds, and a size that nobody has given."""

from __future__ import annotations

import pytest
import torch
from passes_to_judge import Answers, another_order, only_eight_rows, size_of_this_call, twice_as_sum
from torch import nn

from pytest_torchcompile import judge_passes
from pytest_torchcompile.checks import load
from pytest_torchcompile.oracle.pass_records import PassStep

pytestmark = pytest.mark.needs_torch
aten = torch.ops.aten


class Held(nn.Module):
    """Ids and a mask in buffers, a table and a scale in plain attributes."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.register_buffer("ids", torch.tensor([2, 0, 1, 3]), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True, True, False, True]))
        self.register_buffer("on", torch.ones(6, dtype=torch.bool))
        self.places, self.scale = torch.tensor([1, 0, 2, 3, 4, 5]), torch.tensor(0.75)

    def forward(self, x):
        hidden = self.up(x[:, self.ids]) * self.mask
        return hidden[:, self.places] * self.scale + self.on


def keep_as_it_is(name, value):
    """A pass that puts what the model holds under a name into the graph, as it is when the pass is made."""
    # Outside of the pass, where no tensor is fake.
    elements = value.flatten().tolist()

    def bake(module):
        found = []
        for node in module.graph.find_nodes(op="placeholder"):
            given, where = node.meta["val"], node.meta["desc"].expr()
            # Of plain attributes torch tells no name.
            plain = (where.startswith("args[") and isinstance(given, torch.Tensor)
                     and (given.shape, given.dtype) == (value.shape, value.dtype))
            if f"'{name}'" in where or plain:
                found.append(node)
        (node,) = found
        operators = [each for each in module.graph.nodes if each.op == "call_function"]
        with module.graph.inserting_before(operators[0]):
            made = []
            for each in elements:
                made.append(module.graph.call_function(aten.full.default, ([], each), {"dtype": value.dtype}))
            constant = made[0]
            if value.ndim:
                constant = module.graph.call_function(aten.stack.default, (made,))
        node.replace_all_uses_with(constant, delete_user_cb=lambda user: user.op != "output")

    return bake


@pytest.mark.parametrize("name", ["ids", "mask", "on", "places", "scale"])
def test_what_a_model_holds_is_told_where_a_pass_keeps_it(name):
    """Whole numbers, Booleans and plain attributes have other values in the second half of the calls."""
    torch.manual_seed(0)
    model = Held()
    bake = keep_as_it_is(name, getattr(model, name))
    found = judge_passes(model, [torch.randn(3, 4), torch.randn(5, 4)], [another_order, bake])
    (problem,) = found.problems
    assert problem.startswith("pass 2 of 2 (keep_as_it_is.<locals>.bake) changed output")
    (step,) = [step for step in found.steps if step.wrong]
    assert all(wrong.call.endswith("with other values") for wrong in step.wrong)
    assert not found.remarks


def test_what_a_model_holds_is_left_to_right_passes():
    """Values that move accuse nobody."""
    found = judge_passes(Held(), [torch.randn(3, 4)], [another_order, "dead_code"])
    assert found.ok, str(found)


class Sorted(nn.Module):
    """Takes its bounds in one order alone, and a mask that leaves something."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bounds", torch.tensor([0, 2, 4]))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("step", torch.tensor(1))

    def forward(self, x):
        kept = torch.bucketize(x, self.bounds.sort().values.float())
        hidden = x.masked_fill(~self.mask, float("-inf")).softmax(-1)
        return hidden * 2 + kept * self.step


def test_what_cannot_be_moved_is_told():
    """A mask without anything, which makes NaN, and a number that has no other."""
    found = judge_passes(Sorted(), [torch.randn(3, 4)], [another_order])
    assert found.ok, str(found)
    assert found.remarks == ("buffer mask, buffer step had the same values in all calls, so values of theirs that a "
                             "pass has put into the graph are not seen",)
    assert str(found).endswith(f"note: {found.remarks[0]}")


@pytest.mark.parametrize("rows", [8, 2, 1])
def test_a_size_that_a_pass_has_kept_is_told_with_one_size(rows):
    """Another size is tried; the pass is silent with the given one."""
    (problem,) = judge_passes(Answers(torch.tanh), [torch.randn(rows, 6)], [size_of_this_call]).problems
    assert problem.startswith("pass 1 of 1 (size_of_this_call) changed output")
    right = judge_passes(Answers(torch.tanh), [torch.randn(rows, 6)], [twice_as_sum])
    assert right.ok, str(right)
    assert not right.remarks


def refuses_open_sizes(module):
    """Only for static graphs."""
    for node in module.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["val"], torch.SymInt):
            raise NotImplementedError("sizes vary")


def test_where_no_other_size_is_tried_it_is_told():
    """The model takes none, the pass takes none, or none was asked for."""
    one = [torch.randn(8, 6)]
    (refused,) = judge_passes(Answers(only_eight_rows), one, [twice_as_sum]).remarks
    assert refused.startswith("the model takes no other size (7 in dimension 0: RuntimeError in forward: shape '[8")
    assert refused.endswith("), so a size that a pass has put into the graph is not seen: give calls of two sizes")
    found = judge_passes(Answers(torch.tanh), one, [twice_as_sum, refuses_open_sizes])
    assert found.ok, str(found)
    refused, unused = found.remarks
    assert unused == ("pass 2 of 2 (refuses_open_sizes): judged on the graph of forward and backward; a pass that is "
                      "for inference alone needs train=False")
    told = "pass 2 of 2 (refuses_open_sizes)"
    assert refused.startswith(f"with {told} the model raises in call 2 (a size that was tried: 7 in dimension 0): "
                              f"{told} raised NotImplementedError: sizes vary")
    assert refused.endswith("; so a size that a pass has put into the graph is not seen: give calls of two sizes, or "
                            "ask for static ones")
    static = judge_passes(Answers(torch.tanh), one, [size_of_this_call], dynamic=False).remarks[0]
    assert static == ("static sizes were asked for: none was tried beside the given one, and passes may rely on that")
    section = {"passes": [PassStep("pass 1 of 1 (a:b)", compared=1).to_dict()], "remarks": [static]}
    assert load("passes").remark(section) == static
