"""Steps on numbers that were computed from whole numbers alone: wide runs take over what eager has decided."""

from __future__ import annotations

import copy
import math
from typing import ClassVar

import pytest
import torch
from torch import nn
from transcript_programs import Biased, buckets, rows

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Tape, compare, own_decisions, problem, record, reference
from pytest_torchcompile.oracle.counted_decisions import CountedDecisions, DecisionReplay, DecisionWatch
from pytest_torchcompile.oracle.noise import Wide

pytestmark = pytest.mark.needs_torch


def recorded(model, *inputs):
    tape = Tape()
    module = model if isinstance(model, nn.Module) else None
    return record(model, module, Batch.of(*inputs), mode=tape), tape


def biased(edge=0.0):
    torch.manual_seed(1)
    model = Biased()
    model.edge = edge
    return model


def reference_of(tape):
    return reference(biased(), Batch.of(rows()), tape=tape)


def wrong_leaves(compiled, tape, eager):
    return [leaf.name for leaf in compare(eager, compiled, reference_of(tape)) if problem(leaf)]


def test_noise_does_not_turn_what_eager_has_decided():
    _, tape = recorded(biased(), rows())
    assert [kept.dtype for kept in tape.decisions.held_tensors()] == [torch.int64]
    spreads = []
    for taken in (tape.decisions.taken, []):
        tape.decisions.taken = taken
        spreads.append(float(reference_of(tape).estimates["output"].spread.max()))
    assert spreads[0] < 1e-6 < 1e-2 < spreads[1]


def test_code_that_decides_otherwise_is_right():
    eager, tape = recorded(biased(), rows())
    assert not torch.equal(buckets(1e-6), buckets(-1e-6))
    for edge in (1e-6, -1e-6):
        compiled, _ = recorded(biased(edge), rows())
        assert wrong_leaves(compiled, tape, eager) == []


def test_code_that_decides_otherwise_in_the_last_elements_alone_is_right():
    """As a loop over vectors does, which leaves them to another function."""
    eager, tape = recorded(biased(), rows())
    compiled, _ = recorded(biased([0.0] * 63 + [-1e-6] * 64), rows())
    mine, theirs = (recording.outputs["output"].value for recording in (eager, compiled))
    assert (mine != theirs).any(0).any(-1).nonzero().tolist() == [[63]]
    assert wrong_leaves(compiled, tape, eager) == []


def powers(count, turned=()):
    """Of each number the largest power of two that is no larger; of those at the places ``turned`` the one below."""
    exponents = torch.log(torch.arange(1, count + 1).float()) / math.log(2.0)
    for place in turned:
        exponents[place] -= 1e-6
    return exponents.to(torch.int64)


class Long(nn.Module):
    turned: ClassVar = ()

    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(40, 1)

    def forward(self, x):
        return (self.bias(powers(20000, self.turned))[:, 0] + x).tanh()


@pytest.mark.parametrize("exponent", [5, 9, 10])
def test_one_element_of_many_that_is_decided_otherwise_is_right(exponent):
    torch.manual_seed(1)
    model, x = Long(), torch.randn(20000)
    eager, tape = recorded(model, x)
    turned = copy.deepcopy(model)
    turned.turned = (2**exponent - 1,)
    compiled, _ = recorded(turned, x)
    assert int((compiled.outputs["output"].value != eager.outputs["output"].value).sum()) == 1
    found = compare(eager, compiled, reference(model, Batch.of(x), tape=tape))
    assert not any(map(problem, found))


class Square(nn.Module):
    edge = 0.0

    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(40, 1)

    def forward(self, x):
        places = torch.arange(60)
        distances = (places[None] - places[:, None]).abs() + 1
        # In float64 rounding decides at powers of two, too.
        exponents = torch.log(distances.to(self.bias.weight.dtype)) / math.log(2.0)
        exponents = torch.cat([exponents[:, :48], exponents[:, 48:] + self.edge], 1)
        return (self.bias(exponents.to(torch.int64))[..., 0] + x).tanh()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_ends_of_rows_may_be_decided_otherwise(dtype, sign):
    torch.manual_seed(1)
    model, x = Square().to(dtype), torch.randn(60, 60, dtype=dtype)
    eager, tape = recorded(model, x)
    turned = copy.deepcopy(model)
    turned.edge = sign * 64 * torch.finfo(dtype).eps
    compiled, _ = recorded(turned, x)
    found = compare(eager, compiled, reference(model, Batch.of(x), tape=tape))
    assert not any(map(problem, found))


def test_a_program_that_remembers_outside_the_module_decides_anew():
    """Its wide run skips what the eager run has computed: what comes next would be given the wrong decisions."""
    kept = {}

    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Embedding(20, 4)

        def forward(self, x):
            if "first" not in kept:
                kept["first"] = (torch.arange(8).float() / 2).to(torch.int64)
            second = (torch.arange(8).float() * 2).to(torch.int64)
            return self.bias(kept["first"]) + self.bias(second).sin() + x

    torch.manual_seed(1)
    model, x = Remembers(), torch.randn(8, 4)
    eager, tape = recorded(model, x)
    assert sum(tensor is not None for _, tensor in tape.decisions.taken) == 2
    made = reference(model, Batch.of(x), tape=tape)
    assert made.kind == "float64"
    assert torch.allclose(made.estimates["output"].value.float(), eager.outputs["output"].value)


def test_where_many_decisions_are_at_the_edge_any_are_taken_to_be_right(monkeypatch):
    eager, tape = recorded(biased(), rows())
    turned, _ = recorded(biased(1e-6), rows())
    if torch.equal(turned.outputs["output"].value, eager.outputs["output"].value):
        turned, _ = recorded(biased(-1e-6), rows())
    kinds = []
    known = CountedDecisions.changed
    monkeypatch.setattr(CountedDecisions, "changed", lambda taken, results: kinds.append(1) or known(taken, results))
    assert wrong_leaves(turned, tape, eager) == []
    assert kinds
    kinds.clear()
    monkeypatch.setattr(own_decisions, "_MOST", 0)
    assert wrong_leaves(turned, tape, eager) == []
    assert not kinds


def test_decisions_are_turned_three_times_at_most(monkeypatch):
    """Else a model that stays wrong would be judged without end, beside one reference after another."""
    eager, tape = recorded(biased(), rows())
    compiled, _ = recorded(biased(), rows())
    compiled.outputs["output"].value[0] += 1.0
    asked = []

    def taken_by(own, values, accused):
        asked.append(accused)
        return own._taken

    monkeypatch.setattr(own_decisions.OwnDecisions, "taken_by", taken_by)
    assert wrong_leaves(compiled, tape, eager) == ["output"]
    assert asked == [["output"]] * 3


GRADIENTS = ["bias.weight", "layer.weight", "layer.bias"]


@pytest.mark.parametrize("factor", [1.001, 1.3, 0.0, -1.0])
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("edge", [0.0, -1e-6])
def test_a_wrong_gradient_is_found_whatever_was_decided(edge, name, factor):
    """The other leaves are right beside what was decided, so that rounding excuses no other decision."""
    eager, tape = recorded(biased(), rows())
    compiled, _ = recorded(biased(edge), rows())
    compiled.gradients[f"gradient of {name}"].mul_(factor)
    assert wrong_leaves(compiled, tape, eager) == [f"gradient of {name}"]


class TwoBiased(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Biased(), Biased()

    def forward(self, x):
        first = self.first(x)
        return first, self.second(first.mean(1).tanh())


@pytest.mark.parametrize("name", ["", "first.layer.bias", "second.bias.weight"])
@pytest.mark.parametrize("turned", ["first", "second", "both"])
def test_one_of_two_layers_may_decide_otherwise(turned, name):
    """As where one of them is not compiled. Eager decides the same in both."""
    models = []
    for edge in (0.0, -1e-6):
        torch.manual_seed(1)
        model = TwoBiased()
        for layer in ("first", "second"):
            if turned in (layer, "both"):
                getattr(model, layer).edge = edge
        models.append(model)
    eager, tape = recorded(models[0], rows())
    compiled, _ = recorded(models[1], rows())
    expected = []
    if name:
        compiled.gradients[f"gradient of {name}"].mul_(1.01)
        expected.append(f"gradient of {name}")
    found = compare(eager, compiled, reference(models[0], Batch.of(rows()), tape=tape))
    assert [leaf.name for leaf in found if problem(leaf)] == expected


@pytest.mark.parametrize("size", [1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
def test_an_error_of_any_size_is_found(size):
    """Without eager's decisions those up to a hundredth would be within the noise."""
    eager, tape = recorded(biased(), rows())
    compiled, _ = recorded(biased(), rows())
    value = compiled.outputs["output"].value
    value += size * torch.randn_like(value) * value.std()
    assert wrong_leaves(compiled, tape, eager) == ["output"]


def test_a_model_of_whole_numbers_alone_may_decide_otherwise():
    """There is no distance to measure."""
    eager, tape = recorded(lambda x: buckets(1e-6) + x, torch.zeros(127, dtype=torch.int64))
    compiled, _ = recorded(lambda x: buckets(-1e-6) + x, torch.zeros(127, dtype=torch.int64))
    made = reference(lambda x: buckets(1e-6) + x, Batch.of(torch.zeros(127, dtype=torch.int64)), tape=tape)
    leaves = compare(eager, compiled, made)
    assert not any(map(problem, leaves))
    assert any(leaf.undecidable for leaf in leaves)


def test_a_wrong_bucket_is_found():
    """Where no rounding decides: buckets that are off by one."""
    eager, tape = recorded(biased(), rows())
    compiled, _ = recorded(biased(1.0), rows())
    assert wrong_leaves(compiled, tape, eager)[:2] == ["output", "loss"]


def test_what_depends_on_a_parameter_or_on_an_input_is_decided_anew():
    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            counted = torch.arange(4).float()
            mine = (counted * 2 > 3) & (counted.floor() > 0)
            written = counted.clone()
            written.mul_(self.weight)
            mine = mine & (counted / torch.tensor(3.0) > 0.5)
            return x * mine, x > 0, (counted * self.weight) > 1, written[1:] > 0

    _, tape = recorded(Decides(), torch.randn(4))
    kept = [(key[0][0], tensor is not None) for key, tensor in tape.decisions.taken]
    assert kept[:4] == [("gt", True), ("floor", True), ("gt", True), ("gt", True)]
    assert kept[4:] == [("gt", False)] * 3


def test_whole_numbers_that_come_of_others_are_not_counted():
    def argmax(x):
        return x * (nn.functional.one_hot(x.argmax(), 4).float() > 0.5)

    def handed_over(x):
        return x * (torch.full((4,), float(x.mean())) > 0.5)

    def view(x):
        return x * torch.arange(4).float().view(torch.int32)

    for model in (argmax, handed_over, view):
        _, tape = recorded(model, torch.randn(4))
        assert tape.decisions.taken == []


def test_random_numbers_are_not_counted():
    _, tape = recorded(lambda x: x * (torch.rand(4) > 0.5), torch.randn(4))
    assert tape.decisions.taken == []


def test_a_replay_gives_each_call_its_own():
    def model(x):
        first, second = torch.arange(4).float().sqrt().floor(), torch.arange(2, 6).float().sqrt().floor()
        return x + first + 2 * second, (torch.arange(4) > 1) & (torch.arange(4).double() > 2)

    eager, tape = recorded(model, torch.zeros(4))
    # As if eager had decided otherwise.
    for _, kept in tape.decisions.taken:
        kept.copy_(kept + 1 if kept.is_floating_point() else ~kept)
    with Wide(torch.float64, tape, decisions=DecisionReplay(tape.decisions, torch.float64)):
        value, chosen = model(torch.zeros(4, dtype=torch.float64))
    assert value.dtype == torch.float64
    assert torch.equal(value, eager.outputs["output[0]"].value.double() + 3)
    assert chosen.tolist() == [False, False, True, False]
    with Wide(torch.float64, tape, decisions=(watch := DecisionWatch(tape.decisions, torch.float64))):
        value, _ = model(torch.zeros(4, dtype=torch.float64))
    assert torch.equal(value, eager.outputs["output[0]"].value.double())
    assert [other.number for other in watch.others] == [0, 1, 2]
