"""Passes one by one: the wrong ones are named with their number and the worst value, right ones are silent."""

from __future__ import annotations

import inspect
import json
import re

import pytest
import torch
from passes_to_judge import Answers, another_order, only_eight_rows, size_of_this_call, twice_as_sum
from torch import nn
from torch._inductor import lowering

from pytest_torchcompile import judge_passes
from pytest_torchcompile.backends import PASS_NAMES
from pytest_torchcompile.backends.bf16_islands import bf16_islands
from pytest_torchcompile.backends.toolkit import Toolkit
from pytest_torchcompile.checks import load
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.layer.config import CompileConfig
from pytest_torchcompile.layer.equivalence import ObjectTrial
from pytest_torchcompile.oracle.diagnosis import blamed_backend, locate_stage, stage_summary
from pytest_torchcompile.oracle.pass_records import PassStep, WrongLeaf
from pytest_torchcompile.run.subject import cxx_compiler
from pytest_torchcompile.state.torch_state import isolated

pytestmark = pytest.mark.needs_torch
aten = torch.ops.aten
needs_cxx = pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler found; install g++ or clang")


class Net(nn.Module):
    """A bias that only its own gradient reaches, something that is scaled, and a buffer that is written to."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        hidden = self.norm(self.up(x)).tanh()
        return self.down(hidden * 2) + self.down(hidden * 2)


def judged(passes, **options):
    """The net with some passes, for two sizes."""
    torch.manual_seed(0)
    return judge_passes(Net(), [torch.randn(8, 6), torch.randn(5, 6)], passes, **options)


def scale_result(module, operator, factor):
    """Multiply what the first call of an operator gives."""
    node = module.graph.find_nodes(op="call_function", target=operator)[0]
    with module.graph.inserting_after(node):
        scaled = module.graph.call_function(aten.mul.Tensor, (node, factor))
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)


def wrong_backward(module):
    """The derivative of tanh, off by a thousandth."""
    scale_result(module, aten.tanh_backward.default, 1.001)


def wrong_bias(module):
    """One gradient alone: the last sum of a gradient for a bias."""
    output = module.graph.output_node()
    results = list(output.args[0])
    (place,) = [number for number, each in enumerate(output.meta["desc"])
                if each is not None and each.expr().startswith("__grad") and "'down.bias'" in each.expr()]
    with module.graph.inserting_before(output):
        results[place] = module.graph.call_function(aten.mul.Tensor, (results[place], 1.0001))
    output.args = (results,)


def wrong_forward(module):
    """tanh is left out of the forward; its derivative stays."""
    node = module.graph.find_nodes(op="call_function", target=aten.tanh.default)[0]
    node.replace_all_uses_with(node.args[0])


def undo_wrong_forward(module):
    """The error of the pass before it is taken back, in part."""
    scale_result(module, aten.addmm.default, 1.0)


def sum_in_parts(module):
    """A sum over the batch as a product with ones: right, up to rounding."""
    for node in module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        source = node.args[0]
        with module.graph.inserting_before(node):
            ones = module.graph.call_function(aten.ones_like.default, (source,))
            total = module.graph.call_function(aten.mul.Tensor, (source, ones))
        node.args = (total, *node.args[1:])


@pytest.mark.parametrize(("function", "worst"), [
    (wrong_backward, r"gradient of up\.\w+|gradient of input\[0\]|gradient of norm\.\w+"),
    (wrong_bias, r"gradient of down\.bias"),
    (wrong_forward, r"output"),
])
def test_a_wrong_pass_is_named_by_number_and_leaf(function, worst):
    """Between two right ones, which are not blamed."""
    found = judged([another_order, function, twice_as_sum])
    (problem,) = found.problems
    name = function.__name__
    assert re.fullmatch(rf"pass 2 of 3 \({name}\) changed ({worst}) \([\d.e+]+ times the rounding noise\)", problem)
    assert [step.told.partition(" (")[0] for step in found.steps] == [
        "the capture itself", "pass 1 of 3", "pass 2 of 3", "pass 3 of 3"]


def test_only_the_gradient_that_is_wrong():
    """No other value is named."""
    (step,) = [step for step in judged([wrong_bias]).steps if step.wrong]
    assert [wrong.name for wrong in step.wrong] == ["gradient of down.bias"]


def test_two_wrong_passes_are_both_named():
    """Each is measured from the graph before it."""
    found = judged([wrong_forward, another_order, wrong_bias])
    assert [problem.partition(" changed")[0] for problem in found.problems] == [
        "pass 1 of 3 (wrong_forward)", "pass 3 of 3 (wrong_bias)"]


def test_right_passes_are_silent():
    """Three of one's own and all that have a name."""
    exact = [name for name in PASS_NAMES if name not in ("bf16_islands", "cuda_graphs")]
    found = judged([another_order, twice_as_sum, sum_in_parts, *exact])
    assert found.ok, str(found)
    idle = ("dead_code", "no_op_views", "constant_folding", "bucket_collectives")
    assert all(any(name in told for name in idle) for told in found.unused)


def islands_without_dtype(module):
    """Right, but for what it does not say: that it computes in bfloat16."""
    bf16_islands(module)


def wrong_islands(module):
    """The pass, with one product of the backward a quarter too large."""
    bf16_islands(module)
    product = module.graph.find_nodes(op="call_function", target=aten.mm.default)[0]
    with module.graph.inserting_before(product):
        larger = module.graph.call_function(aten.mul.Tensor, (product.args[0], 1.25))
    product.args = (larger, product.args[1])


wrong_islands.brings_in = torch.bfloat16


@pytest.mark.slow
def test_a_pass_that_brings_in_a_dtype():
    """Judged in that dtype's noise from then on: right ones are silent, wrong ones told, and so is who keeps silent."""
    found = judged(["bf16_islands", another_order, sum_in_parts])
    assert found.ok, str(found)
    assert not any("bf16" in told for told in found.unused)
    assert judged([islands_without_dtype]).problems[0].startswith("pass 1 of 1 (islands_without_dtype) changed output")
    (problem,) = judged([another_order, wrong_islands, twice_as_sum]).problems
    assert re.match(r"pass 2 of 3 \(wrong_islands\) changed gradient of \S+ \([\d.]+ times", problem)


def test_before_a_dtype_comes_in_passes_are_held_to_the_models_own():
    """Of an error that bfloat16 would hide, and the pass that brings it in is not blamed for it."""
    (problem,) = judged([wrong_bias, "bf16_islands", twice_as_sum]).problems
    assert problem.startswith("pass 1 of 3 (wrong_bias) changed gradient of down.bias")


def test_decompositions_are_a_step_with_its_noise():
    """Which operators they replace, and how far the numbers move."""
    found = judged([twice_as_sum], decompositions="inductor")
    assert found.ok, str(found)
    (step,) = [step for step in found.steps if step.operators]
    assert step.told == "decompositions inductor"
    assert step.operators["aten.t.default"] < 0
    assert 0 < step.noise < 4
    assert re.match(r"decompositions inductor change numbers by up to [\d.]+ times the rounding noise; operators: aten",
                    step.remark)


def test_a_pass_that_raises_ends_the_steps():
    """What it said, with its number among all."""
    def fails(module):
        raise ValueError("no such thing")

    found = judged(["dead_code", fails, "common_subexpressions"])
    assert len(found.steps) == 3
    (problem,) = found.problems
    assert re.search(r"with pass 2 of 3 \(.*fails\) the model raises: pass 2 of 3 \(.*fails\) raised ValueError: no "
                     r"such thing \(test_pass_steps\.py:\d+\)", problem)


def test_mistakes_in_the_call():
    """As of compare()."""
    with pytest.raises(UsageError, match="calls is empty"):
        judge_passes(Net(), [], ["dead_code"])
    # A test without the marker would be green, and have judged nothing.
    with pytest.raises(UsageError, match=r"there is no pass to judge; give passes=\[my_pass\], or the marker"):
        judge_passes(Net(), [torch.randn(2, 6)], [])


def test_the_check_judges_what_was_stored():
    """Plain data through JSON; what is no matter of numbers comes first."""
    wrong = (WrongLeaf("output", "call 1", "output: error is 5 times ...", 5.0),
             WrongLeaf("output.dtype", "call 1", "output: is float32 in eager, float64 compiled", None))
    steps = [PassStep("the capture itself", compared=3), PassStep("pass 1 of 1 (a:b)", wrong=wrong, compared=3)]
    section = json.loads(json.dumps({"passes": [step.to_dict() for step in steps]}))
    (problem,) = load("passes").judge(section, {})
    assert problem.message == "pass 1 of 1 (a:b) changed output.dtype (is float32 in eager, float64 compiled)"
    assert "error is 5 times" in problem.evidence
    (empty,) = load("passes").judge({"passes": [PassStep("pass 1 of 1 (a:b)").to_dict()]}, {})
    assert empty.message == "nothing was compared at pass 1 of 1 (a:b)"
    idle = {"passes": [PassStep("pass 1 of 1 (a:b)", changed=False, compared=1).to_dict()]}
    assert load("passes").remark(idle) == "pass 1 of 1 (a:b) changed no graph"


def thrice(module):
    """x * 2 as x * 3."""
    for node in module.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        if node.args[1] == 2:
            node.args = (node.args[0], 3)


def other_strides(module):
    """The first result, column after column."""
    output = module.graph.output_node()
    first, *others = output.args[0]
    with module.graph.inserting_before(output):
        turned = module.graph.call_function(aten.t.default, (first,))
        copied = module.graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
        found = module.graph.call_function(aten.t.default, (copied,))
    output.args = ([found, *others],)


@pytest.mark.parametrize("factor", [0.0, float("nan")])
def test_a_model_that_gives_nothing_proves_nothing(factor):
    """A wrong pass would be called right."""
    found = judge_passes(Answers(lambda x: x * factor), [torch.randn(8, 6)], [thrice])
    assert not found.ok
    assert found.problems[-1].endswith(": of every call nothing came but zeros and NaN")


def test_calls_that_raise_prove_nothing():
    """Where eager raises in all; where it raises in the first alone, the second is judged."""
    batches = [torch.randn(5, 6), torch.randn(8, 6)]
    all_raise = judge_passes(Answers(only_eight_rows), batches[:1], ["dead_code"])
    assert re.match(r"nothing was compared at the capture itself: in call 1 the model raises, without a pass too: "
                    r"RuntimeError.*: shape '\[8, 4\]' is invalid for input of size 20", all_raise.problems[0])
    one_raises = judge_passes(Answers(only_eight_rows), batches, [thrice])
    assert re.match(r"pass 1 of 1 \(thrice\) changed output", one_raises.problems[-1]), str(one_raises)


def test_strides_of_a_result_are_told():
    """The user has them, whatever a pass chooses inside."""
    found = judge_passes(Answers(torch.tanh), [torch.randn(8, 6)], [other_strides])
    assert found.problems == ("pass 1 of 1 (other_strides) changed output "
                              "(stride is (4, 1) in eager, (1, 8) compiled)",)


def without_buffer(module):
    """The running mean is zero, as in the first call."""
    replace_input(module, "norm.running_mean", 0.0)


def without_weight(module):
    """The weight of the norm is one, as in the first call."""
    replace_input(module, "norm.weight", 1.0)


def replace_input(module, name, value):
    """A constant of 16 elements for what the model has under this name; gradients and results stay."""
    for node in module.graph.find_nodes(op="placeholder"):
        if f"'{name}'" in node.meta["desc"].expr():
            operators = [each for each in module.graph.nodes if each.op == "call_function"]
            with module.graph.inserting_before(operators[0]):
                constant = module.graph.call_function(aten.full.default, ([16], value))
            node.replace_all_uses_with(constant, delete_user_cb=lambda user: user.op != "output")


@pytest.mark.parametrize(("function", "worst"), [
    (without_buffer, "buffer norm.running_mean"),
    (without_weight, "output"),
    (size_of_this_call, "output"),
])
def test_what_is_true_of_the_first_call_alone(function, worst):
    """A buffer, a weight, a size: other values and the first size come after the calls."""
    found = judged([another_order, function, twice_as_sum])
    (problem,) = found.problems
    assert problem.startswith(f"pass 2 of 3 ({function.__name__}) changed {worst} (")
    (step,) = [step for step in found.steps if step.wrong]
    assert {wrong.call for wrong in step.wrong} <= {"call 1, with other values", "call 2, with other values"}


def once_right(factor):
    """A pass that scales tanh: by one when it is judged itself, in its first two runs, else by a factor."""
    runs = []

    def scale_tanh(module):
        runs.append(module)
        scale_result(module, aten.tanh.default, 1.0 if len(runs) <= 2 else factor)

    return scale_tanh


@pytest.mark.parametrize(("factor", "ok"), [(1.5, False), (1, True)])
def test_a_pass_that_makes_another_graph_each_time(factor, ok):
    """The pass behind it is not blamed; where both graphs compute the same it is a remark."""
    found = judge_passes(Answers(torch.tanh), [torch.randn(8, 6)], [once_right(factor), another_order])
    told = r"pass 1 of 2 \(.*scale_tanh\) makes another graph each time that it runs"
    assert found.ok == ok
    if ok:
        assert re.fullmatch(told, found.steps[-1].remark)
    else:
        (problem,) = found.problems
        assert re.fullmatch(rf"{told}, so pass 2 of 2 \(another_order\) is not judged: output differs \(\S+ times the "
                            r"rounding noise\), and either may have changed it", problem)


class Branches(nn.Module):
    """Its branch hangs on a value."""

    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x


def test_a_graph_break_is_told_with_its_line():
    """Of the model, not of torch."""
    line = inspect.getsourcelines(Branches.forward)[1] + 1
    (problem,) = judge_passes(Branches(), [torch.randn(8, 6)], ["dead_code"]).problems
    assert re.match(r"with the capture itself the model raises: .*Unsupported: Data-dependent branching at "
                    rf"\S+test_pass_steps\.py:{line} \(if x\.sum\(\) > 0:\)", problem)


@needs_cxx
@pytest.mark.parametrize(("settings", "ends", "blamed"), [
    ({"passes": [another_order, wrong_forward]}, "with decompositions inductor agrees, with passes differs: look at "
     "the graph passes: the check `passes`, or judge_passes(), tells which", ""),
    ({"passes": [another_order]}, "with passes agrees; with compiler inductor is the first that does not: look at "
     "Inductor's lowering, fusion or generated code", "inductor"),
    ({"decompositions": {aten.tanh.default: lambda x: 2.01 * torch.sigmoid(2 * x) - 1}, "compiler": "eager"},
     "toolkit agrees; with decompositions of your own is the first that does not: look at decompositions of your own",
     ""),
])
def test_the_stages_of_a_toolkit(monkeypatch, settings, ends, blamed):
    """Capture, table, passes, compiler; and which compiler is asked for an operator."""
    if blamed:
        right = lowering.lowerings[aten.tanh.default]
        monkeypatch.setitem(lowering.lowerings, aten.tanh.default, lambda x: lowering.mul(right(x), 1.01))
    toolkit = Toolkit(**{"compiler": "inductor", "decompositions": "inductor", **settings})
    trial = ObjectTrial(Answers(torch.tanh), [torch.randn(8, 6)], CompileConfig(backend=toolkit), None, steps=1)
    with isolated([]):
        trial.run()
        located = locate_stage(trial)
    assert stage_summary(located).endswith(ends)
    assert stage_summary(located).startswith("stages: backend eager agrees, aot_eager agrees, toolkit agrees")
    assert blamed_backend(located) == blamed
