"""What correct compilers were accused of on real models, each as a program of a few lines that shows the same."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pytest_torchcompile import CompileConfig, compare, maybe_compile, zoo
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.checks import load, safe_fallback
from pytest_torchcompile.checks.numerics import judge_leaves, measure_leaves, remark_leaves
from pytest_torchcompile.layer.compiled_modules import is_compiled_module
from pytest_torchcompile.ledger import frames
from pytest_torchcompile.ledger.break_sites import code_owner
from pytest_torchcompile.observation import Job, Observation
from pytest_torchcompile.oracle import recorder
from pytest_torchcompile.oracle.chances import compare_chances, sample_chances
from pytest_torchcompile.oracle.discrepancies import find_discrepancies
from pytest_torchcompile.oracle.leaf_limits import Leaf, Limits, note, problem
from pytest_torchcompile.oracle.properties import alias_pairs, compare_items, compare_properties
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.oracle.recording import Item, Recording
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.run.runner import run_cell
from pytest_torchcompile.run.verdicts import judge_observation
from pytest_torchcompile.state.value_leaves import leaves_of

pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")]


class UnusedPooler(nn.Module):
    """What becomes of BERT's pooler when the loss leaves it out: AOTAutograd gives its weight zeros."""

    def __init__(self):
        super().__init__()
        self.body, self.pooler = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        hidden = self.body(x)
        return {"hidden": hidden, "pooled": torch.tanh(self.pooler(hidden))}


def loss_of_hidden(output, batch):
    return output["hidden"].square().mean()


def test_zeros_in_place_of_none_are_a_note():
    """The kind says what it is, the note what it changes; a training says it in one line too."""
    found = compare(UnusedPooler(), [torch.randn(4, 6)], CompileConfig(enabled=True, backend="aot_eager"),
                    loss=loss_of_hidden, steps=2)
    assert found.ok, str(found)
    kinds = {(leaf.name, leaf.kind) for _, leaf in found.leaves if leaf.kind == "zero_gradient"}
    assert ("gradient of pooler.weight", "zero_gradient") in kinds
    assert ("step 1: gradient of pooler.weight", "zero_gradient") in kinds
    told = next(text for text in found.notes if text.startswith("gradient of pooler.weight"))
    assert "eager has none, compiled has zeros" in told
    assert "weight decay and momentum" in told


def test_other_gradients_in_place_of_none_stay_wrong():
    """Zeros are the one exception: what is no zero, and what is lost, is a problem."""
    something, nothing = Item(torch.tensor([0.0, 1e-30])), Item(None)
    (extra,) = compare_items("gradient of w", "gradient", nothing, something)
    assert problem(extra) == "gradient of w: eager has none, compiled a gradient"
    (nan,) = compare_items("gradient of w", "gradient", nothing, Item(torch.full((2,), float("nan"))))
    assert problem(nan) == "gradient of w: eager has none, compiled a gradient"
    (lost,) = compare_items("gradient of w", "gradient", Item(torch.zeros(2)), nothing)
    assert problem(lost) == "gradient of w: eager has a gradient, compiled none"
    (zeros,) = compare_items("gradient of w", "gradient", nothing, Item(torch.zeros(2)))
    assert problem(zeros) is None
    assert note(zeros).startswith("gradient of w: eager has none, compiled has zeros: optimisers skip the one")


def test_a_long_structure_is_told_by_its_first_difference():
    """Two dicts of hundreds of entries are one line."""
    eager = ", ".join(f"'gradient of layer.{i}.weight': *" for i in range(100))
    other = eager.replace("layer.50", "layer.fifty")
    (told, *_) = compare_properties(Recording(structure=eager), Recording(structure=other))
    text = problem(told)
    assert len(text) < 500
    assert "layer.50.weight" in text
    assert "layer.fifty.weight" in text
    (short, *_) = compare_properties(Recording(structure="(*, *)"), Recording(structure="[*, *]"))
    assert problem(short) == "output structure: eager returned (*, *), compiled [*, *]"




CALLS = itertools.count()


@torch.library.custom_op("pytest_torchcompile_tests::atomics", mutates_args=())
def atomics(x: torch.Tensor) -> torch.Tensor:
    """The identity but for one rounding, in two calls of three: as sums that a GPU adds up in any order."""
    return x * (1 + (next(CALLS) % 3 - 1) * torch.finfo(x.dtype).eps)


@atomics.register_fake
def _(x):
    return torch.empty_like(x)


atomics.register_autograd(lambda ctx, gradient: atomics(gradient))


class Atomics(nn.Module):
    """A layer whose results and gradients never repeat bit by bit, nor by more than rounding."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return atomics(self.down(torch.tanh(atomics(self.up(x)))))


class KeyBias(nn.Module):
    """Attention: the gradient of the keys' bias is 0 in exact arithmetic, so that all of it is rounding."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        scores = atomics(self.q(x) @ self.k(x).mT)
        return atomics(scores.softmax(-1) @ self.v(x))


class Wavers(nn.Module):
    """Eager does not repeat itself by far; a part of it does."""

    def __init__(self):
        super().__init__()
        self.steady = nn.Linear(6, 6)

    def forward(self, x):
        return {"wavers": x * entropy(x.detach()), "steady": self.steady(x)}


ENTROPY = random.Random(0)


@torch.library.custom_op("pytest_torchcompile_tests::entropy", mutates_args=())
def entropy(x: torch.Tensor) -> torch.Tensor:
    """A number around 1, another one in each call."""
    return x.new_full((1,), ENTROPY.uniform(0.9, 1.1))


@entropy.register_fake
def _(x):
    return x.new_empty((1,))


def scaled_outputs(factor):
    """A backend that multiplies what waves by a factor."""

    def backend(graph, example):
        return lambda *inputs: [y * factor if y.shape == (4, 6) and i == 0 else y
                                for i, y in enumerate(graph(*inputs))]

    return CompileConfig(enabled=True, backend=backend)


def test_what_eager_does_not_repeat_is_undecided():
    """A note and a count, no failure; what does repeat is judged as ever."""
    found = compare(Wavers(), [torch.randn(4, 6)], CompileConfig(enabled=True, backend="eager"), train=False)
    assert found.ok, str(found)
    undecided = {leaf.name for _, leaf in found.leaves if leaf.kind == "nondeterministic"}
    assert "output['wavers']" in undecided
    assert "output['steady']" not in undecided
    assert any("two eager runs from one state and seed differ by more than rounding" in text for text in found.notes)
    section = measure_leaves(SimpleNamespace(compiled=SimpleNamespace(error=None)), list(found.leaves))
    assert section["undecided"] >= 3
    assert list(judge_leaves(section, "output")) == []
    assert remark_leaves(section) == f"{section['compared']} of {len(found.leaves)} leaves were decided"


def test_what_is_far_from_every_eager_run_stays_wrong():
    """Not repeating excuses what eager's own runs differ by, not a factor of 50."""
    found = compare(Wavers(), [torch.randn(4, 6)], scaled_outputs(50.0), train=False, locate=False)
    wrong = {problem.where: problem.message for problem in found.problems}
    assert "times as far from the nearest of 6 eager runs as these are apart (limit 16" in wrong["output['wavers']"]


def test_a_gradient_of_nothing_but_rounding_that_does_not_repeat():
    """Nothing can be said of it, so nobody is blamed; in steps of training neither."""
    torch.manual_seed(0)
    found = compare(KeyBias(), [torch.randn(2, 5, 8)], CompileConfig(enabled=True, backend="aot_eager"), steps=3)
    assert found.ok, str(found)


def cell_of(model, inputs, *checks):
    """What the checks say of a cell of a model and inputs of this file."""
    entry = ModelEntry("model", f"{__name__}:{model.__name__}", f"{__name__}:{inputs.__name__}")
    job = Job(Cell(model="model", backend="aot_eager").to_dict(), entry.to_dict(), str(Path.cwd()), checks)
    seen, _ = run_cell(job)
    assert seen["failure"] is None, seen["failure"]
    return judge_observation(Observation.from_dict(seen), checks, {})


def rows():
    return torch.randn(4, 6)


def test_a_fallback_need_not_repeat_what_eager_does_not():
    """The check safe_fallback asks first whether eager's gradients repeat bit by bit."""
    (found,) = cell_of(Atomics, rows, "safe_fallback").values()
    assert found.verdict == "pass", found.problems


def test_a_fallback_that_is_wrong_is_still_seen():
    """Where eager wavers by rounding a thousandth is no rounding."""
    module, batch = Atomics(), Batch.of(rows())
    side = SimpleNamespace(module=module, restore=lambda: None)
    run = SimpleNamespace(calls=[SimpleNamespace(batch=batch)], loss=None, train=True, seed=0)
    assert list(safe_fallback._differences(run, side, module, module, lambda: module)) == []

    def off_by_a_thousandth(x):
        return module(x) * 1.001

    wrong = list(safe_fallback._differences(run, side, module, off_by_a_thousandth, lambda: module))
    assert any(text.startswith("output: error is") for text in wrong)
    exact = nn.Linear(6, 6)
    side = SimpleNamespace(module=exact, restore=lambda: None)

    def off_by_a_bit(x):
        return exact(x) * (1 + 2**-23)

    wrong = list(safe_fallback._differences(run, side, exact, off_by_a_bit, lambda: off_by_a_bit))
    assert any(text.startswith("output: error is") for text in wrong), "where eager repeats itself one bit is too much"


def test_a_fallback_that_seldom_rounds_otherwise_is_not_accused():
    """Sums that a GPU adds up in any order: eager's runs may all be alike, and the fallback the first that is not."""
    exact, batch = nn.Linear(6, 6), Batch.of(rows())
    side = SimpleNamespace(module=exact, restore=lambda: None)
    run = SimpleNamespace(calls=[SimpleNamespace(batch=batch)], loss=None, train=True, seed=0)
    factors = iter([1 + 2**-23, 1 + 2**-23])

    def seldom_off(x):
        return exact(x) * next(factors, 1.0)

    assert list(safe_fallback._differences(run, side, exact, seldom_off, lambda: seldom_off)) == []


class CancelledBias(nn.Module):
    """The gradient of the bias is 0 in exact arithmetic: rounding in eager, and 0 where a compiler cancels terms."""

    def __init__(self):
        super().__init__()
        self.body, self.bias = nn.Linear(6, 6), nn.Parameter(torch.full((2,), 2.0**-24))

    def forward(self, x):
        hidden = self.body(x)
        nothing = hidden * 0
        if not torch.compiler.is_compiling():
            nothing = hidden + 1 - 1 - hidden
        return hidden + self.bias.sum() * nothing.detach()


def test_steps_too_small_to_move_a_parameter_on_one_side_are_judged_by_values():
    """"Eager wrote to it, the compiled call did not" is no accusation in training: the values are rounding apart."""
    torch.manual_seed(0)
    found = compare(CancelledBias(), [torch.randn(4, 6)], CompileConfig(enabled=True, backend="aot_eager"), steps=3)
    assert found.ok, str(found)
    differing = {leaf.name: leaf for _, leaf in found.leaves if not leaf.bitwise}
    assert "step 1: gradient of bias" in differing, "eager moved it, or this test shows nothing"
    # What its gradients have made of it is judged with them.
    assert "bias after 3 steps" not in differing


def test_random_draws_that_repeat_but_for_rounding_obey_the_seed():
    """The check randomness takes another order of summation for the same numbers, and another draw for others."""
    def repeats(dropout):
        model = nn.Sequential(Atomics(), dropout)
        return compare_chances(*(sample_chances(model, model, Batch.of(rows()), seeds=8) for _ in range(2)))

    seeds = [leaf for leaf in repeats(nn.Dropout(0.5)) if leaf.name == "seeds"]
    assert seeds[0].message == ""


class Keyless(dict):
    """What diffusers registers with pytree: a dict of its own, without keys."""


pytree.register_pytree_node(Keyless, lambda d: (list(d.values()), list(d)),
                            lambda values, keys: Keyless(zip(keys, values, strict=True)))


class ReturnsKeyless(nn.Module):
    """Like every model of diffusers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 6)

    def forward(self, x):
        y = self.net(x)
        return {"out": Keyless(sample=y, parts=[y * 2, y * 3])}


def test_classes_registered_without_keys_have_index_paths():
    """They were an error that blamed the user, and maybe_compile raised."""
    paths = [path for path, _ in leaves_of(ReturnsKeyless()(rows()))[0]]
    assert paths == ["['out'][0]", "['out'][1][0]", "['out'][1][1]"]
    found = compare(ReturnsKeyless(), [rows()], CompileConfig(enabled=True, backend="eager"))
    assert found.ok, str(found)
    made = maybe_compile(ReturnsKeyless(), CompileConfig(enabled=True, backend="eager"), None, rows())
    assert is_compiled_module(made)


def test_parts_of_one_allocation_share_no_memory():
    """What overlaps does, also interleaved and expanded; a planned buffer that holds two outputs is no alias."""
    whole = torch.zeros(4, 6)
    parts = [("head", whole[:2]), ("tail", whole[2:]), ("even", whole[:, ::2]), ("odd", whole[:, 1::2])]
    assert alias_pairs(parts[:2], []) == set()
    assert alias_pairs(parts[2:], []) == set()
    assert alias_pairs(parts[:3:2], []) == {("even", "head")}
    assert alias_pairs([("row", whole[1])], [("tail", whole[2:]), ("whole", whole)]) == {("row", "whole")}
    assert alias_pairs([("wide", whole[:1].expand(3, 6)), ("head", whole[:2])], []) == {("head", "wide")}
    assert alias_pairs([("ints", whole.view(torch.int32)[3]), ("tail", whole[2:])], []) == {("tail", "ints")}


def in_one_buffer(graph, example):
    """A backend that puts its outputs into one allocation, as Inductor's memory planning does."""

    def run(*inputs):
        outputs = graph(*inputs)
        memory = torch.empty(sum(y.numel() for y in outputs))
        places = memory.split([y.numel() for y in outputs])
        return [place.view(y.shape).copy_(y) for place, y in zip(places, outputs, strict=True)]

    return run


def test_outputs_planned_into_one_buffer_are_no_alias():
    """Eager allocates each by itself; nobody can see the difference."""
    found = compare(lambda x: (x * 2, x + 1), [rows()], CompileConfig(enabled=True, backend=in_one_buffer), train=False)
    assert found.ok, str(found)


class WritesToInput(nn.Module):
    """In place, to what another layer has computed: eager allows it, for a leaf it raises."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 6)

    def forward(self, x):
        return self.net(x.mul_(2))


def test_an_input_that_is_a_result_may_be_written_to():
    """The copy that is run is a result too, and its gradient is compared."""
    def batch():
        return torch.linspace(-1, 1, 24).view(4, 6).requires_grad_() * 1.0

    seen = record(net := WritesToInput(), net, Batch.of(batch()))
    assert seen.error is None
    assert torch.equal(seen.mutated["input[0] after the call"], 2 * batch().detach())
    assert seen.gradients["gradient of input[0]"].any()
    found = compare(WritesToInput(), [batch()], CompileConfig(enabled=True, backend="aot_eager"))
    assert found.ok, str(found)
    wrong = compare(WritesToInput(), [batch()], CompileConfig(enabled=True, backend="eager"),
                    wrap=lambda model, settings: model if settings is None else torch.compile(
                        lambda x: model(x * 1.0), backend="eager"), locate=False)
    assert "mutation" in {problem.kind for problem in wrong.problems}


def test_frames_of_ours_are_never_the_users():
    """Not even where the package is a checkout in the user's project."""
    for module in (recorder, frames):
        assert code_owner(module.__file__, str(Path(module.__file__).parents[2])) == "ours"
    assert code_owner(zoo.__file__, str(Path(zoo.__file__).parents[1])) != "ours"


def approximated(graph, example):
    """A backend whose gelu is that of Inductor on a CPU: right to 1e-7 times its argument, also where it is near 0."""

    def run(x):
        wave = torch.sin(torch.arange(x.numel()) * 1.7).view(x.shape)
        return [graph(x)[0] + 1.0e-7 * wave * x.abs().clamp(min=1)]

    return run


def test_an_approximation_is_right_in_absolute_terms():
    """gelu of -5 is -1.4e-6: an error of 5e-7 there is none, one of 1e-5 is."""
    x = torch.linspace(-6, 6, 2048)
    found = compare(nn.functional.gelu, [x], CompileConfig(enabled=True, backend=approximated), train=False)
    assert found.ok, str(found)

    def off(graph, example):
        return lambda x: [graph(x)[0] + 1e-5]

    wrong = compare(nn.functional.gelu, [x], CompileConfig(enabled=True, backend=off), train=False, locate=False)
    assert [problem.kind for problem in wrong.problems if problem.where == "output"] == ["value"]


NEAR = Leaf("output", "value", numel=4, rms=9.0, bias=1.0, peak=9.0, index=(1,), eager=1e-9, compiled=2e-9,
            expected=1e-9)


def test_less_than_one_eps_of_the_largest_value_is_a_note():
    """No problem and no fallback; above it, and where no such size is known, limits decide."""
    assert problem(replace(NEAR, grain=0.9)) is None
    assert "9 times the rounding noise (limit 7), but less than one eps of its largest value" in note(
        replace(NEAR, grain=0.9))
    assert problem(replace(NEAR, grain=1.1)) is not None
    assert note(replace(NEAR, grain=1.1)) is None
    assert problem(NEAR) is not None
    assert problem(replace(NEAR, grain=0.9), Limits(0, 0, 0, grain=0)) is not None


def kept(value):
    """What is left of a value whose elements below an eps of the largest are set to zero."""
    return value * (value.abs() > 1.1e-7 * value.abs().max().clamp(max=16))


class FlushedForward(torch.autograd.Function):
    """Small outputs are lost, gradients right."""

    @staticmethod
    def forward(ctx, x):
        return kept(x)

    @staticmethod
    def backward(ctx, g):
        return g


class FlushedBackward(torch.autograd.Function):
    """Small gradients are lost, outputs right."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return kept(g)


class Wide(nn.Module):
    """One large feature beside seven small ones."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 8)
        self.register_buffer("sizes", torch.tensor([16.0] + [1e-6] * 7))

    def forward(self, x):
        return torch.sigmoid(self.net(x)) * self.sizes


class Rare(nn.Module):
    """Seven of eight parameters have small gradients."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 2, 8))
        self.register_buffer("sizes", torch.tensor([4.0] + [3e-8] * 7))

    def forward(self, x):
        return (x * self.w * self.sizes).sum(-1)


def test_values_that_are_flushed_to_zero_are_no_approximation():
    """Most of what is off is lost: then no largest value excuses it."""
    torch.manual_seed(0)

    def flushed(graph, example):
        return lambda *inputs: [FlushedForward.apply(y) for y in graph(*inputs)]

    wrong = compare(Wide(), [torch.randn(4, 4)], CompileConfig(enabled=True, backend=flushed), locate=False)
    assert "output" in {problem.where for problem in wrong.problems}


class Cancels(nn.Module):
    """Gradients of seven of eight parameters are what float64 leaves of a value that cancels."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(1, 2, 8))
        self.register_buffer("sizes", torch.tensor([1e-3] + [1e-20] * 7))

    def forward(self, x):
        return (x * self.w * self.sizes).sum(-1)


@pytest.mark.parametrize(("added", "is_wrong"), [(1e-12, False), (1e-8, True)], ids=["rounding", "too much"])
def test_what_cancels_exactly_in_eager_need_not_when_compiled(added, is_wrong):
    """Nothing of such a gradient can be lost. Beside the others it may be off by their rounding, and by no more."""
    torch.manual_seed(0)

    class Uncancelled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.view_as(w)

        @staticmethod
        def backward(ctx, g):
            return g + added * torch.tensor([1.0, -1.0] * 4) * (g.abs() < 1e-15)

    def uncancelled(graph, example):
        return lambda *inputs: graph(*(Uncancelled.apply(x) if x.shape == (8,) and x.requires_grad else x
                                       for x in inputs))  # fmt: skip

    found = compare(Cancels(), [torch.randn(4, 8)], CompileConfig(enabled=True, backend=uncancelled), locate=False)
    assert ("gradient of w" in {problem.where for problem in found.problems}) == is_wrong


def test_gradients_that_are_flushed_to_zero_are_no_approximation():
    """The same rule."""
    torch.manual_seed(0)

    def flushed(graph, example):
        def run(*inputs):
            return graph(*(FlushedBackward.apply(x) if x.requires_grad else x for x in inputs))

        return run

    wrong = compare(Rare(), [torch.randn(4, 8)], CompileConfig(enabled=True, backend=flushed), locate=False)
    assert "gradient of w" in {problem.where for problem in wrong.problems}


def test_what_is_excused_is_told_with_the_verdict():
    """Also where the check passes."""
    run = SimpleNamespace(compiled=SimpleNamespace(error=None))
    section = measure_leaves(run, [("call 1", replace(NEAR, grain=0.9))])
    assert remark_leaves(section) == ("1 value(s) are off by more than rounding, but less than one eps of their "
                                      "largest element")


def test_masks_do_not_widen_what_is_excused():
    """Beside -1e9 one eps of the largest value would be 119: a value of 16 is the largest that counts."""
    def masked(x):
        return torch.cat([torch.sin(x), torch.full((8,), -1e9)]) * 1.1

    def off(graph, example):
        return lambda x: [torch.cat([y[:-8] + 5e-6, y[-8:]]) for y in graph(x)]

    x = torch.linspace(-2, 2, 256)
    wrong = compare(masked, [x], CompileConfig(enabled=True, backend=off), train=False, locate=False)
    assert "output" in {problem.where for problem in wrong.problems}


def test_the_worst_of_many_elements_may_be_further_off():
    """resnet18: 1 of 2,359,296 was 16.2 times its noise; the number of all elements looked at counts."""
    worst = Leaf("gradient of w", "gradient", numel=2_359_296, rms=1.0, bias=1.0, peak=16.2)
    assert problem(worst) is None
    assert problem(replace(worst, peak=25.0)) is not None
    small = replace(worst, numel=4096)
    assert problem(small) is not None
    assert find_discrepancies([("call 1", small)]) != []
    beside = replace(worst, name="other", peak=3.0)
    assert find_discrepancies([("call 1", small), ("call 1", beside)]) == []
    assert find_discrepancies([("call 1", replace(small, peak=25.0)), ("call 1", beside)]) != []


def test_equivalence_takes_limits_in_units_of_noise():
    """A matrix sets them with a reason; they hold for what was stored, too."""
    run = SimpleNamespace(compiled=SimpleNamespace(error=None))
    section = measure_leaves(run, [("call 1", NEAR)]) | {"raised": None}
    check = load("equivalence").judge
    assert "9 times the rounding noise (limit 7)" in next(iter(check(section, {}))).message
    assert list(check(section, {"rms": 6, "peak": 20})) == []
    assert list(check(section, {"rms": 6, "peak": 8})) != []
