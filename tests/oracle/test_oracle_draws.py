"""How much noise is drawn: none where eager's own error decides, and then for the suspicious leaves alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import compare, problem, record, reference
from pytest_torchcompile.oracle.calls import Call, Side, TrialOptions
from pytest_torchcompile.oracle.dice import FEW
from pytest_torchcompile.oracle.estimate import Estimate
from pytest_torchcompile.oracle.expected import Reference, References, room_beside
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.tape import Tape, _drawn_by
from pytest_torchcompile.oracle.training import BY_LEFT_OUT, Training, no_loss, steps_of
from pytest_torchcompile.oracle.trial import Trial

pytestmark = pytest.mark.needs_torch


def two_outputs(x):
    """Two leaves that round."""
    return x.exp().sum(-1) / 3, (x @ x.t()).sin() * 1.1


def rounding(*shape):
    """Factors that move every eighth value up or down at random, by one float32 rounding."""
    return 1 + 2.0**-23 * (torch.randint(0, 16, shape).eq(0).double() - torch.randint(0, 16, shape).eq(0).double())


def changed(recording, **factors):
    """The recording with some outputs multiplied; ``first`` and ``second`` are theirs."""
    names = {"first": "output[0]", "second": "output[1]"}
    outputs = dict(recording.outputs)
    for which, factor in factors.items():
        item = outputs[names[which]]
        outputs[names[which]] = replace(item, value=(item.value * factor).to(item.value.dtype))
    return replace(recording, outputs=outputs)


def case(function=two_outputs):
    """A batch, eager's recording of it and a reference that has drawn nothing yet."""
    torch.manual_seed(0)
    batch = Batch.of(torch.randn(64, 32))
    eager = record(function, None, batch, train=False)
    return eager, reference(function, batch, train=False, draw=False)


def test_what_is_as_near_as_eager_draws_nothing():
    """Eager's own error from the float64 run is the measure; no run with noise is made."""
    eager, expected = case()
    leaves = compare(eager, changed(eager, first=rounding(64), second=rounding(64, 64)), expected)
    assert not any(map(problem, leaves))
    assert expected.draws == 0
    assert {leaf.draws for leaf in leaves if leaf.numerical} == {1}


def test_a_wrong_leaf_draws_all_there_is_and_for_itself_alone():
    """Nothing is reported before 36 draws; the other leaf is decided and gets none."""
    eager, expected = case()
    leaves = compare(eager, changed(eager, first=rounding(64), second=1 + 1e-4), expected)
    assert [leaf.name for leaf in leaves if problem(leaf)] == ["output[1]"]
    assert expected.estimates["output[1]"].offered == 36
    assert expected.estimates["output[0]"].offered == 0


def test_eager_far_from_the_reference_is_no_measure_by_itself():
    """An error of eager's that is more than rounding would excuse as much in the compiled run: noise is drawn."""

    def off(x):
        return x.exp() * (1 + 1e-3 * (x.dtype is torch.float32)), x * 1.1

    eager, expected = case(off)
    leaves = compare(eager, changed(eager, first=1 + 1e-3), expected)
    assert expected.estimates["output[0]"].offered == 36
    assert [leaf.name for leaf in leaves if problem(leaf)] == ["output[0]"]


def test_the_same_number_is_the_same_noise_whoever_asks_first():
    """A verdict doesn't depend on which cell or leaf has drawn before."""
    _, one = case()
    _, other = case()
    one.more(["output[0]"])
    one.more(["output[1]"])
    other.more(["output[0]", "output[1]"])
    for name in ("output[0]", "output[1]"):
        assert one.estimates[name].offered == other.estimates[name].offered == 1
        assert torch.equal(one.estimates[name].spread, other.estimates[name].spread)


def bias_before_a_batch_norm(factor):
    """Its gradient is zero but for rounding; compiled has so many times eager's. The leaf, and its estimate."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), Batch.of(torch.randn(32, 8))
    eager = record(model, model, batch)
    name = "gradient of 0.bias"
    compiled = replace(eager, gradients={**eager.gradients, name: eager.gradients[name] * factor})
    model[1].reset_running_stats()
    expected = reference(model, batch, draw=False)
    leaves = compare(eager, compiled, expected)
    return next(leaf for leaf in leaves if leaf.name == name), expected.estimates[name]


def test_a_leaf_of_nothing_but_noise_is_undecided_without_a_draw():
    """The gradient of a bias before a batch norm is zero but for rounding; draws said the same."""
    leaf, estimate = bias_before_a_batch_norm(-1.0)
    assert not leaf.decided
    assert problem(leaf) is None
    assert estimate.offered == 0


def test_a_leaf_of_nothing_but_noise_that_compiled_moves_far_is_wrong_by_all_draws():
    """Eager's own error excuses nothing: where it is not enough, noise is drawn."""
    leaf, estimate = bias_before_a_batch_norm(1e3)
    assert "times the rounding noise" in problem(leaf)
    assert estimate.offered == 36


def test_a_gradient_that_float64_alone_cancels_is_no_rounding_and_gets_draws():
    """Eager's gradient is as large as others, so it is another program's: its size is no measure of noise."""

    class Another(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.zeros(8))

        def forward(self, x):
            factor = float(x.dtype is torch.float32)
            return x * self.w + self.shift * factor

    torch.manual_seed(0)
    model, batch = Another(), Batch.of(torch.randn(4, 8))
    eager, name = record(model, model, batch), "gradient of shift"
    compiled = replace(eager, gradients={**eager.gradients, name: eager.gradients[name] * 1.5})
    expected = reference(model, batch, draw=False)
    compare(eager, compiled, expected)
    # One: with nothing expected there, no further one could decide about it.
    assert expected.estimates[name].offered == 1


def test_a_program_that_raises_under_noise_is_measured_in_another_way_when_noise_is_asked_for():
    """The exact run works, the first draw does not: the next kind of reference takes over, and says why."""

    def shy(x):
        y = x.double() if x.dtype is torch.float64 else x
        if bool((y[0, 0].double() != y[0, 0].float().double()) & (y.dtype is torch.float64)):
            raise ValueError("not a float32 number")
        return y.exp(), y * 1.1

    eager, expected = case(shy)
    assert expected.kind == "float64"
    leaves = compare(eager, changed(eager, first=1 + 1e-2), expected)
    assert [leaf.name for leaf in leaves if problem(leaf)] == ["output[0]"]


def test_room_for_references_grows_with_the_memory_of_the_device(monkeypatch):
    """A fiftieth of a machine's, 256 MiB at least and 6 GiB at most."""
    references = References()
    for memory, limit in ((1 << 30, 1 << 28), (100 << 30, 2 << 30), (1 << 50, 6 << 30)):
        monkeypatch.setattr("pytest_torchcompile.system.memory_bytes", lambda memory=memory: memory)
        references.make_room(room_beside([torch.ones(1)]))
        assert references.limit == limit


def asked(references, made, *calls, program="program", passing=False):
    """Ask for calls in turn; returns those that had to be made."""
    made.clear()
    for call in calls:
        def make(call=call):
            made.append(call)
            reference = Reference(Recording())
            reference.estimates["value"] = Estimate(torch.ones(100, dtype=torch.float64))
            return reference

        references.get(program, call, make, passing)
    return list(made)


def test_the_references_of_one_pass_are_kept_for_the_third():
    """Those of the second, which come once, make room for them; then those of another program do."""
    references, made = References(limit=3 * 800), []
    assert asked(references, made, 0, 1, 2, program="other") == [0, 1, 2]
    assert asked(references, made, 0, 1, 2) == [0, 1, 2]
    assert asked(references, made, "0'", "1'", "2'", passing=True) == ["0'", "1'", "2'"]
    assert asked(references, made, 0, 1, 2) == []
    assert asked(references, made, 0, program="other") == [0]


def test_of_references_that_do_not_fit_some_are_kept():
    """Asked for in turn, the one that was there longest is the next: it stays."""
    references, made = References(limit=2 * 800), []
    assert asked(references, made, 0, 1, 2) == [0, 1, 2]
    assert asked(references, made, 0, 1, 2) == [1]
    references = References(limit=799)
    assert asked(references, made, 0, 0) == [0, 0]


def test_one_small_draw_does_not_show_that_a_leaf_repeats():
    """Random numbers that nobody replays come out alike once in a while: a second eager run is asked for then."""
    estimate = Estimate(torch.full((4,), 1.0, dtype=torch.float64))
    estimate.add(torch.full((4,), 1.001, dtype=torch.float64))
    assert not estimate.is_steady
    estimate.add(torch.full((4,), 0.999, dtype=torch.float64))
    assert estimate.is_steady
    estimate.add(torch.full((4,), 1.01, dtype=torch.float64))
    assert not estimate.is_steady


def test_the_mask_of_a_fused_attention_is_for_the_dropout_of_a_wide_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator that makes it again needs a GPU: here it counts. None is made without dropout, or of a huge one."""
    asked = []

    def count(into: torch.Tensor, share: float, seed: int, offset: int) -> None:
        asked.append((share, seed, offset))
        into.copy_(torch.linspace(0, 1, into.numel()).view_as(into))

    monkeypatch.setattr(torch.ops.aten, "_fill_mem_eff_dropout_mask_", count)
    query, key = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 7, 8)
    returned = (query, query, torch.tensor(11), torch.tensor(12))
    fused = "aten::_scaled_dot_product_efficient_attention"
    name, mask = _drawn_by(fused, (query, key, key, None, True, 0.25), {}, returned)
    assert name == "aten::native_dropout"
    assert mask.shape == (2, 3, 5, 7)
    assert mask.double().mean() == pytest.approx(0.75, abs=0.01)
    assert asked == [(0.25, 11, 12)]
    named = _drawn_by(fused, (query, key, key, None, True), {"dropout_p": 0.25}, returned)
    assert torch.equal(named[1], mask)
    assert _drawn_by(fused, (query, key, key, None, True), {}, returned)[1] is None
    monkeypatch.setattr("pytest_torchcompile.oracle.tape._LARGEST_MASK", 209)
    assert _drawn_by(fused, (query, key, key, None, True, 0.25), {}, returned)[1] is None
    assert len(asked) == 2


def flipped_units(distance, seed):
    """A network twice: twelve units of a relu are off for the batch, and on in the second, so many roundings apart.

    Only noise decides about a unit that is a few roundings from zero; its row of the gradient is all or nothing.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 24), nn.ReLU(), nn.Linear(24, 8))
    inputs = torch.randn(1, 256)
    weight, row = model[0].weight.detach().double(), inputs[0].double()
    zero = -weight @ row
    # As float32 adds up 256 products.
    apart = distance * 16 * 2.0**-24 * (weight.square() @ row.square()).sqrt()
    other = copy.deepcopy(model)
    for each, bias in ((model, zero - apart), (other, zero + apart)):
        each[0].bias.data[:12] = bias[:12].float()
    return model, other, Batch.of(inputs)


def compare_flipped(distance, seed):
    model, other, batch = flipped_units(distance, seed)
    eager = record(model, model, batch, loss=square_sum)
    return compare(eager, record(other, other, batch, loss=square_sum), reference(model, batch, loss=square_sum))


def square_sum(output, _):
    return output.square().sum()


@pytest.mark.parametrize("seed", range(6))
def test_units_that_noise_rarely_turns_on_are_no_alarm(seed):
    """Plain noise turns such a unit on once in dozens of draws, and loud noise soon. On CUDA a mobilenet has many."""
    leaves = compare_flipped(1.5, seed)
    assert not any(map(problem, leaves)), [problem(leaf) for leaf in leaves]
    assert any(leaf.numerical and not leaf.bitwise and leaf.draws > FEW for leaf in leaves)


@pytest.mark.parametrize("seed", range(6))
def test_units_that_no_noise_turns_on_are_a_problem(seed):
    wrong = {leaf.name for leaf in compare_flipped(16, seed) if problem(leaf)}
    assert {"gradient of 0.weight", "gradient of 0.bias", "gradient of 2.weight"} <= wrong


class WrongLater(nn.Module):
    """A model whose output, from a call on, is not the right one."""

    def __init__(self, model, after):
        super().__init__()
        self.model, self.after, self.calls = model, after, 0

    def forward(self, x):
        self.calls += 1
        factor = 1.0 if self.calls <= self.after else 1.001
        return self.model(x) * factor


def tried_training(monkeypatch, after=100, calls=None):
    """What is found of three steps of training whose first gradient wants many draws, and what was judged before.

    ``calls``: other ones than one of the batch.
    """
    model, other, batch = flipped_units(1.5, 0)
    taken = {}

    def compare_and_note(eager, compiled, expected, judged, without):
        taken.update(judged)
        return compare(eager, compiled, expected, judged=judged, without=without)

    def make(settings):
        if settings is None:
            return Side(model, model)
        compiled = copy.deepcopy(other)
        return Side(WrongLater(compiled, after), compiled)

    monkeypatch.setattr("pytest_torchcompile.oracle.trial_account.compare", compare_and_note)
    options = TrialOptions(loss=square_sum, steps=3, passes=1, may_raise=True)
    trial = Trial(make, model, {"backend": "eager"}, calls or [Call(0, batch)], options)
    trial.run()
    called, trained = ({leaf.name: leaf for _, leaf in leaves} for leaves in (trial.leaves, trial.trained))
    return called, trained, taken


def test_the_first_step_of_a_training_is_the_first_call_and_gets_no_draws_of_its_own(monkeypatch):
    called, trained, judged = tried_training(monkeypatch)
    first, again = "gradient of 0.weight", "step 1: gradient of 0.weight"
    assert called[first].draws > FEW
    assert judged[again] == trained[again] == replace(called[first], name=again)
    # What the later steps compute was compared in no call.
    assert all(name.startswith("step 1: ") for name in judged)


def test_a_first_step_that_is_another_one_than_the_first_call_is_judged(monkeypatch):
    """Of 3 calls the first is the call; a fault that begins with the training is seen in its first step."""
    called, trained, judged = tried_training(monkeypatch, after=1)
    assert not any(map(problem, called.values()))
    assert not judged
    assert problem(trained["step 1: gradient of 2.weight"])


def test_where_the_first_call_raises_the_training_begins_with_another(monkeypatch):
    """The leaves of that call are of other random numbers, and of other sizes."""
    _, _, batch = flipped_units(1.5, 0)
    calls = [Call(0, Batch.of(torch.zeros(1, 3))), Call(1, batch)]
    called, trained, judged = tried_training(monkeypatch, calls=calls)
    assert called["gradient of 0.weight"].draws > FEW
    assert trained["step 1: gradient of 0.weight"].draws > FEW
    assert not judged


def test_gradients_of_nothing_but_noise_get_no_draw_in_a_training_either():
    """A bias before a batch norm has one in each step; so has the bias of a key."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), Batch.of(torch.randn(32, 8))
    training = Training(model, None, square_sum, 0.0)
    eager = record(training, training, steps_of([batch, batch]), loss=no_loss)
    name = "step 2: gradient of 0.bias"
    outputs = {**eager.outputs, name: replace(eager.outputs[name], value=-eager.outputs[name].value)}
    model[1].reset_running_stats()
    expected = reference(training, steps_of([batch, batch]), loss=no_loss, draw=False)
    leaf = next(leaf for leaf in compare(eager, replace(eager, outputs=outputs), expected) if leaf.name == name)
    assert not leaf.decided
    assert expected.estimates[name].offered == 0


class Heads(nn.Module):
    """Two outputs behind one layer; it counts its calls, those of its copies too."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.first, self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        Heads.calls += 1
        hidden = self.first(x).tanh()
        return {"one": self.one(hidden), "other": self.other(hidden)}


def drawn_for(names):
    """What draws for some leaves do to them, and how many forward passes they take."""
    torch.manual_seed(0)
    model, batch = Heads(), Batch.of(torch.ones(2, 6))
    expected = reference(model, batch, loss=lambda output, value: output["one"].square().sum(), draw=False)
    Heads.calls = 0
    for _ in range(2):
        assert expected.more(names)
    return {name: expected.estimates[name].spread for name in names}, Heads.calls


def test_draws_make_the_pass_through_other_outputs_only_for_its_own_gradients():
    """It is a forward and a backward pass more. What is drawn for a leaf is the same with it and without."""
    one = "gradient of first.weight"
    alone, calls = drawn_for([one])
    # The first draw of all makes it, to see whether it takes noise.
    assert calls == 3
    both, calls = drawn_for([one, one + BY_LEFT_OUT])
    assert calls == 4
    assert torch.equal(alone[one], both[one])
    assert not torch.equal(both[one], both[one + BY_LEFT_OUT])


class Picky(torch.autograd.Function):
    """Its backward takes a gradient of equal rows alone, as none is any more after noise."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if not torch.equal(gradient[0], gradient[1]):
            raise RuntimeError("the rows differ")
        return gradient


class PickyHead(nn.Module):
    """An output that the loss leaves out, whose backward pass no noise gets through."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 30), nn.Linear(30, 10)

    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden), (Picky.apply(hidden) * 1.7).sum(0) * 1.3


def test_the_first_draw_asks_whether_the_second_backward_pass_takes_noise():
    """What leaves of the first pass have asked for before decides nothing about gradients of the second."""
    torch.manual_seed(0)
    model, batch, tape = PickyHead(), Batch.of(torch.randn(16, 20)), Tape()
    asked = {"loss": lambda output, value: output[0].square().mean(), "tape": tape}
    assert record(model, model, batch, loss=asked["loss"], mode=tape).error is None
    expected = reference(model, batch, draw=False, **asked)
    name = "gradient of first.weight"
    assert expected.more([name])
    assert expected.kind == "float64-inputs"
    assert "the rows differ" in expected.why
    assert expected.more([name + BY_LEFT_OUT])
    assert expected.estimates[name + BY_LEFT_OUT].draws > 0
