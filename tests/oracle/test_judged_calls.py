"""What was found of a call is found again where all bits are the same, and only there."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from pytest_torchcompile import CompileConfig, compare
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle.calls import Call, Side, TrialOptions
from pytest_torchcompile.oracle.judged_calls import JudgedCalls, _sums_of_bits
from pytest_torchcompile.oracle.leaf_limits import Leaf, problem
from pytest_torchcompile.oracle.recording import Item, Recording
from pytest_torchcompile.oracle.training import parameters_told_by_gradients
from pytest_torchcompile.oracle.trial import Trial

pytestmark = pytest.mark.needs_torch
KEY = (0, None)


def recorded(**values):
    return Recording(outputs={name: Item(value) for name, value in values.items()})


def leaf(name="output", **fields):
    return replace(Leaf(name, "value", numel=4, dtype="float32", rms=1.0, bias=1.0, peak=1.0, draws=3), **fields)


def kept(*leaves, **values):
    judged = JudgedCalls()
    judged.keep(KEY, recorded(**values), recorded(**{name: value + 1 for name, value in values.items()}), leaves)
    return judged


ONE = torch.arange(4.0)


def test_the_same_bits_are_the_same_finding():
    known = kept(leaf(), output=ONE).leaves_of(KEY, recorded(output=ONE.clone()), recorded(output=ONE + 1))
    assert known == {"output": leaf()}


@pytest.mark.parametrize(("eager", "compiled"), [
    (ONE, ONE + 2),
    (ONE + 1, ONE + 1),
    (ONE.flip(0), ONE + 1),
    (ONE.view(2, 2), ONE + 1),
    (ONE.double(), (ONE + 1).double()),
    (torch.cat([ONE[:3], torch.tensor([3.0000002])]), ONE + 1),
    (3, ONE + 1),
])
def test_other_values_are_not_known(eager, compiled):
    assert kept(leaf(), output=ONE).leaves_of(KEY, recorded(output=eager), recorded(output=compiled)) == {}


def test_another_call_is_not_known():
    judged = kept(leaf(), output=ONE)
    assert judged.knows(KEY)
    assert not judged.knows((1, None))
    assert judged.leaves_of((1, None), recorded(output=ONE), recorded(output=ONE + 1)) == {}


@pytest.mark.parametrize("found", [
    leaf(kind="stride"),
    leaf(kind="nondeterministic", message="two eager runs differ"),
    leaf(message="4 of 4 elements are NaN"),
    leaf(draws=0),
    Leaf("output", "value", numel=4, bitwise=True),
])
def test_what_is_no_measure_of_the_values_is_not_kept(found):
    assert kept(found, output=ONE).leaves_of(KEY, recorded(output=ONE), recorded(output=ONE + 1)) == {}


def test_a_first_step_is_known_by_its_own_names_but_for_problems():
    """A call may have passed a worst element among more leaves, with a wider limit."""
    wrong = leaf("loss", peak=1e3)
    assert problem(wrong)
    judged = kept(leaf(), wrong, output=ONE, loss=ONE)
    eager = recorded(**{"step 1: output": ONE, "step 1: loss": ONE, "step 2: output": ONE})
    compiled = recorded(**{name: item.value + 1 for name, item in eager.outputs.items()})
    assert judged.leaves_of_first_step(0, eager, compiled) == {"step 1: output": leaf("step 1: output")}
    assert judged.leaves_of_first_step(1, eager, compiled) == {}
    assert "loss" in judged.leaves_of(KEY, recorded(loss=ONE), recorded(loss=ONE + 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.bool,
                                   torch.int8, torch.float8_e4m3fn])
def test_every_element_and_its_place_counts(dtype):
    values = (torch.arange(64) % 3 == 0).float().to(dtype)
    sums = {int(_sums_of_bits(values)[0])}
    for place in range(64):
        other = values.clone().view(torch.uint8)
        other[place * values.itemsize] ^= 1
        sums.add(int(_sums_of_bits(other.view(dtype))[0]))
        sums.add(int(_sums_of_bits(values.roll(place % 3))[0]))
    # The values themselves, one more for each place, and two that are rolled.
    assert len(sums) == 1 + 64 + 2


def swapped(values):
    other = values.clone()
    other[[3, 40]] = values[[40, 3]]
    return other


def with_two_signs_flipped(values):
    other = values.clone()
    other[[3, 40]] *= -1
    return other


@pytest.mark.parametrize("change", [torch.neg, torch.abs, swapped, with_two_signs_flipped, lambda x: 2 * x,
                                    lambda x: 16 * x, lambda x: x.conj().resolve_conj(), lambda x: x.flip(0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32, torch.bfloat16])
def test_signs_and_exponents_count(dtype, change):
    """They are a number's uppermost bits, in which a product with an odd number says nothing of the place."""
    torch.manual_seed(0)
    for count in (64, 1708, 2982, 3288):
        values = torch.randn(count, dtype=dtype)
        other = change(values)
        if not torch.equal(values, other):
            assert int(_sums_of_bits(values)[0]) != int(_sums_of_bits(other)[0])


def test_small_whole_numbers_that_change_places_count():
    torch.manual_seed(0)
    seen = {}
    for _ in range(500):
        values = torch.randint(-3, 3, (64,)).double()
        other = swapped(values)
        for each in (values, other):
            known = seen.setdefault(int(_sums_of_bits(each)[0]), each)
            assert torch.equal(known, each)


@pytest.mark.parametrize("train", [False, True])
def test_other_signs_in_the_third_pass_alone_are_seen(train):
    """In float64, where compiled code is off by one rounding in all others: right, and not bit for bit."""
    torch.manual_seed(0)
    model, runs = nn.Sequential(nn.Linear(8, 16), nn.Tanh()).double(), []

    def changed(values, wrong):
        return [value * (1 + 2.0**-52) * (-1 if wrong else 1) for value in values]

    def backend(graph, inputs):
        def run(*given):
            runs.append(0)
            return tuple(changed(graph(*given), len(runs) >= 3))

        return run

    found = compare(model, [torch.randn(4, 8).double()], CompileConfig(enabled=True, backend=backend), locate=False,
                    loss=lambda output, batch: output.square().mean(), train=train)
    assert {label for label, leaf in found.leaves if problem(leaf)} == {"call 1, again"}


def test_long_tensors_count_through_all_pieces():
    values = torch.zeros(1 << 18)
    sums = {int(_sums_of_bits(values)[0])}
    for place in (0, (1 << 17) - 1, 1 << 17, (1 << 18) - 1):
        other = values.clone()
        other[place] = 1.0
        sums.add(int(_sums_of_bits(other)[0]))
    assert len(sums) == 5


class Tilted(nn.Module):
    """A model that is off by a few roundings, and from a call on by more than that."""

    def __init__(self, model, wrong_from=100):
        super().__init__()
        self.model, self.wrong_from, self.calls = model, wrong_from, 0

    def forward(self, x):
        self.calls += 1
        if self.calls >= self.wrong_from:
            return self.model(x) * 1.001
        return self.model(x.double().float()) * (1 + 2.0**-23)


def tried(monkeypatch, wrong_from=100):
    """A trial of one call in three passes; and what each comparison was told that is known."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    known = []
    from pytest_torchcompile.oracle import trial_account as trials

    judge = trials.compare

    def compare_and_note(*recordings, judged, without):
        known.append(judged)
        return judge(*recordings, judged=judged, without=without)

    monkeypatch.setattr(trials, "compare", compare_and_note)

    def make(settings):
        own = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        own.load_state_dict(model.state_dict())
        if settings is None:
            return Side(own, own)
        return Side(Tilted(own, wrong_from), own)

    trial = Trial(make, model, {"backend": "eager"}, [Call(0, Batch.of(torch.randn(32, 8)))], TrialOptions())
    trial.run()
    return trial, known


def test_the_third_pass_is_the_first_again(monkeypatch):
    trial, (first, second, third) = tried(monkeypatch)
    assert not first
    assert not second
    found = {label: [leaf for each, leaf in trial.leaves if each == label] for label, _ in trial.leaves}
    assert [leaf for leaf in found["call 1"] if leaf.draws] == list(third.values())
    assert found["call 1, again"] == found["call 1"]
    assert not any(map(problem, found["call 1"]))


def test_what_is_wrong_in_the_third_pass_alone_is_seen(monkeypatch):
    trial, (_, _, third) = tried(monkeypatch, wrong_from=3)
    assert not third
    wrong = {label for label, leaf in trial.leaves if problem(leaf)}
    assert wrong == {"call 1, again"}


STEPS = ("step 1: gradient of weight", "step 2: gradient of weight, added to that of step 1")


def trained(written=0.0):
    """Two steps of a parameter, by what a training records; and the parameter before them."""
    before = nn.Linear(3, 3, bias=False)
    gradients = [torch.randn(3, 3), torch.randn(3, 3)]
    after = before.weight.detach().clone()
    for gradient in gradients:
        after.add_(gradient, alpha=-0.125)
    outputs = {name: Item(gradient) for name, gradient in zip(STEPS, gradients, strict=True)}
    return before, Recording(outputs=outputs, mutated={"weight after the call": after + written})


def test_a_parameter_that_its_gradients_have_moved_says_no_more_than_they():
    before, recording = trained()
    assert parameters_told_by_gradients([recording, recording], before, 0.125) == {"weight after the call"}


def test_a_parameter_that_something_else_has_written_to_is_told():
    before, recording = trained()
    _, written = trained(1e-3)
    for both in ([recording, written], [written, recording]):
        assert parameters_told_by_gradients(both, before, 0.125) == frozenset()
    assert parameters_told_by_gradients([recording], before, 0.25) == frozenset()
