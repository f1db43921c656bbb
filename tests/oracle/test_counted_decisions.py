"""Steps on numbers that were computed from whole numbers alone: wide runs take over what eager has decided."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn
from transcript_programs import Biased, buckets, rows

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Tape, compare, own_decisions, problem, record, reference
from pytest_torchcompile.oracle.counted_decisions import DecisionReplay, DecisionWatch
from pytest_torchcompile.oracle.noise import Wide

pytestmark = pytest.mark.needs_torch
GRADIENTS = ["bias.weight", "layer.weight", "layer.bias"]


def recorded(model, *inputs):
    tape = Tape()
    module = model if isinstance(model, nn.Module) else None
    return record(model, module, Batch.of(*inputs), mode=tape), tape


def recorded_with(model, x, **attributes):
    """A copy of a model with other attributes."""
    other = copy.deepcopy(model)
    for name, value in attributes.items():
        setattr(other, name, value)
    return recorded(other, x)[0]


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
    compiled = recorded_with(model, x, turned=(2**exponent - 1,))
    assert int((compiled.outputs["output"].value != eager.outputs["output"].value).sum()) == 1
    found = compare(eager, compiled, reference(model, Batch.of(x), tape=tape))
    assert not any(map(problem, found))


def test_decisions_of_any_strides():
    def program(x, edge=0.0):
        distances = (torch.arange(20)[None] - torch.arange(20)[:, None]).abs() + 1
        exponents = torch.log(distances.T.float()) / math.log(2.0) + edge
        found = exponents.to(torch.int64)
        assert not found.is_contiguous()
        return found * x

    x = torch.randn(20, 20)
    eager, tape = recorded(program, x)
    compiled, _ = recorded(lambda x: program(x, -1e-6), x)
    assert not torch.equal(compiled.outputs["output"].value, eager.outputs["output"].value)
    assert not any(map(problem, compare(eager, compiled, reference(program, Batch.of(x), tape=tape))))


def test_nan_is_decided_as_nan(monkeypatch):
    """Numbers that nobody uses: each NaN would be an edge of its own."""
    def program(x, edge=0.0):
        distances = torch.arange(64)[None] - torch.arange(64)[:, None]
        exponents = torch.floor(torch.log(distances.float()) / math.log(2.0) + edge)
        return torch.where(distances > 0, exponents, 0.0) * x

    x = torch.randn(64, 64)
    eager, tape = recorded(program, x)
    compiled, _ = recorded(lambda x: program(x, -1e-6), x)
    compiled.outputs["output"].value[0] += 1.0
    made = reference(program, Batch.of(x), tape=tape)
    assert "output" in [leaf.name for leaf in compare(eager, compiled, made) if problem(leaf)]
    assert 0 < len(made._own_decisions._edges) < 40


@pytest.mark.parametrize("lost", [None, "shape"])
def test_a_lost_gradient_is_found(lost):
    """It has no distance by which decisions could be told."""
    eager, tape = recorded(biased(), rows())
    compiled, _ = recorded(biased(), rows())
    name = "gradient of layer.weight"
    compiled.gradients[name] = None if lost is None else compiled.gradients[name][:1]
    assert set(wrong_leaves(compiled, tape, eager)) == {name}


def test_a_mask_beyond_the_range_of_the_dtype_tells_nothing():
    """In float64 it is a number, where float16 has none; it has nothing to do with the decisions."""
    class Masked(Biased):
        def forward(self, x):
            mask = torch.zeros(4, 4, dtype=x.dtype).masked_fill(torch.ones(4, 4).triu(1) > 0, torch.finfo(x.dtype).min)
            return mask, super().forward(x)

    torch.manual_seed(1)
    model, x = Masked().half(), rows().half()
    eager, tape = recorded(model, x)
    compiled = recorded_with(model, x, edge=-1e-6)
    assert not torch.equal(compiled.outputs["output[1]"].value, eager.outputs["output[1]"].value)
    found = compare(eager, compiled, reference(model, Batch.of(x), tape=tape))
    assert not any(map(problem, found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decision_may_mask_with_infinity(dtype):
    class Scores(Biased):
        def forward(self, x):
            found = buckets(self.edge)
            return super().forward(x).sum(-1).masked_fill(found < 10, -math.inf)

    torch.manual_seed(1)
    model, x = Scores().to(dtype), rows().to(dtype)
    eager, tape = recorded(model, x)
    compiled = recorded_with(model, x, edge=-1e-6)
    mine, theirs = (recording.outputs["output"].value for recording in (eager, compiled))
    assert not torch.equal(mine.isinf(), theirs.isinf())
    assert not any(map(problem, compare(eager, compiled, reference(model, Batch.of(x), tape=tape))))


def test_a_number_of_python_tells_of_decisions():
    class Tells(Biased):
        def forward(self, x):
            out = super().forward(x)
            return out, float(out.detach().mean())

    torch.manual_seed(1)
    model = Tells()
    eager, tape = recorded(model, rows())
    made = reference(model, Batch.of(rows()), tape=tape)
    for edge, factor in ((0.0, 1.001), (-1e-6, 1.0)):
        compiled = recorded_with(model, rows(), edge=edge)
        item = compiled.outputs["output[1]"]
        compiled.outputs["output[1]"] = replace(item, value=item.value * factor)
        found = [leaf.name for leaf in compare(eager, compiled, made) if problem(leaf)]
        assert found == ([] if factor == 1 else ["output[1]"])


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
    compiled = recorded_with(model, x, edge=sign * 64 * torch.finfo(dtype).eps)
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


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Biased() for _ in range(6)])

    def forward(self, x):
        outputs = []
        for layer in self.layers:
            outputs.append(layer(x))
            x = outputs[-1].mean(1).tanh()
        return outputs


def test_one_of_many_layers_may_decide_otherwise():
    """The outputs of the others are right; edges of one layer are turned together, those of two layers are not."""
    torch.manual_seed(1)
    model = Stack()
    eager, tape = recorded(model, rows())
    turned = copy.deepcopy(model)
    turned.layers[5].edge = -1e-6
    compiled, _ = recorded(turned, rows())
    made = reference(model, Batch.of(rows()), tape=tape)
    assert not any(map(problem, compare(eager, compiled, made)))
    assert sum(len(edge.numbers) for edge in made._own_decisions._edges) > own_decisions._MOST


def thirds(edge):
    """Of each pixel the nearest one of a smaller image: rounding decides about each third one."""
    return (torch.arange(96).float() * (1 / 3) + edge).floor().long().clamp(min=0)


class Resized(nn.Module):
    edge = 0.0

    def __init__(self):
        super().__init__()
        self.bias, self.layer = nn.Embedding(40, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x[:, None] + self.bias(thirds(self.edge)).sin())


@pytest.mark.parametrize("name", ["", *GRADIENTS])
@pytest.mark.parametrize("edge", [0.0, -1e-6])
def test_of_many_edges_groups_are_turned(edge, name):
    torch.manual_seed(1)
    model = Resized()
    eager, tape = recorded(model, rows())
    compiled = recorded_with(model, rows(), edge=edge)
    made = reference(model, Batch.of(rows()), tape=tape)
    expected = []
    if name:
        expected = [f"gradient of {name}"]
        compiled.gradients[expected[0]].mul_(1.01)
    found = compare(eager, compiled, made)
    assert [leaf.name for leaf in found if problem(leaf)] == expected
    if made._own_decisions is not None:
        assert len(made._own_decisions._edges) > own_decisions._MOST


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
    assert asked == [["output"]] * 4


@pytest.mark.parametrize("factor", [1.001, 1.3, 0.0, -1.0])
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("edge", [0.0, -1e-6])
def test_a_wrong_gradient_is_found_whatever_was_decided(edge, name, factor):
    """The other leaves are right beside what was decided, so that rounding excuses no other decision."""
    eager, tape = recorded(biased(), rows())
    compiled, _ = recorded(biased(edge), rows())
    compiled.gradients[f"gradient of {name}"].mul_(factor)
    assert wrong_leaves(compiled, tape, eager) == [f"gradient of {name}"]


@pytest.mark.parametrize("edge", [0.0, -1e-6])
def test_a_model_that_is_wrong_as_a_whole_is_found(edge):
    """No leaf is right, so that all of them are told from turned decisions by how little edges explain of them."""
    eager, tape = recorded(biased(), rows())
    wrong = biased(edge)
    with torch.no_grad():
        wrong.bias.weight.mul_(1.001)
    compiled, _ = recorded(wrong, rows())
    found = wrong_leaves(compiled, tape, eager)
    assert "output" in found
    assert len(found) >= 4


class Near(Biased):
    """Of one distance the bucket is wrong, which is none at an edge."""

    distance = 0

    def forward(self, x):
        found = buckets(self.edge)
        if self.distance:
            found[self.distance - 1] -= 1
        return self.layer(x[:, None] + self.bias(found).sin())


@pytest.mark.parametrize("distance", [14, 17, 30, 38, 40, 70, 120])
@pytest.mark.parametrize("edge", [0.0, -1e-6])
def test_an_error_like_another_decision_is_found(edge, distance):
    """A wrong bucket moves what the right one at an edge nearby moves, in other places."""
    torch.manual_seed(1)
    model = Near()
    eager, tape = recorded(model, rows())
    compiled = recorded_with(model, rows(), edge=edge, distance=distance)
    found = compare(eager, compiled, reference(model, Batch.of(rows()), tape=tape))
    names = [leaf.name for leaf in found if problem(leaf)]
    assert names[0] == "output"
    assert {f"gradient of {name}" for name in GRADIENTS} <= set(names)


def test_an_error_is_told_beside_what_compiled_code_has_decided():
    """Not with what other decisions move: a thousandth is no eight percent. What is right says why it differs."""
    eager, tape = recorded(biased(), rows())
    compiled, _ = recorded(biased(-1e-6), rows())
    compiled.gradients["gradient of layer.weight"].mul_(1.001)
    found = {leaf.name: leaf for leaf in compare(eager, compiled, reference_of(tape))}
    wrong = found["gradient of layer.weight"]
    assert wrong.compiled / wrong.expected == pytest.approx(1.001, abs=1e-5)
    assert "compiled code rounds to another whole number where only rounding decides" in found["output"].excused


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


@pytest.mark.parametrize("is_mask", [False, True], ids=["buckets", "mask"])
@pytest.mark.parametrize("with_numbers", [False, True], ids=["alone", "beside numbers"])
@pytest.mark.parametrize("edge", [1e-6, -1e-6])
def test_whole_numbers_may_be_decided_otherwise(edge, with_numbers, is_mask):
    """Whether or not a floating number shows the decision, too."""
    def program(x, edge=0.0):
        found = buckets(edge)
        if is_mask:
            found = found > 9
        return (found, x.sin()) if with_numbers else found

    x = torch.arange(4.0)
    eager, tape = recorded(program, x)
    compiled, _ = recorded(lambda x: program(x, edge), x)
    leaves = compare(eager, compiled, reference(program, Batch.of(x), tape=tape))
    assert not any(map(problem, leaves))
    wrong, _ = recorded(lambda x: program(x, edge), x)
    decided = next(iter(wrong.outputs.values())).value
    decided[3] = not decided[3]
    leaves = compare(eager, wrong, reference(program, Batch.of(x), tape=tape))
    assert [leaf.kind for leaf in leaves if problem(leaf)] == ["value"]


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
