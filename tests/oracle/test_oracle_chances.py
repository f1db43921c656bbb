"""Random numbers that are not eager's: keep rate, mean, scale and seeds are compared over many calls."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import problem
from pytest_torchcompile.oracle.chances import Moments, compare_chances, sample_chances, variance_distance, welch

pytestmark = pytest.mark.needs_torch


class Drops(nn.Module):
    """A layer and dropout, whose working the tests spoil."""

    def __init__(self, dropout=lambda y: F.dropout(y, 0.25, True)):
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 32), dropout

    def forward(self, x):
        """Drop a quarter."""
        return self.dropout(self.linear(x))


def pair(dropout):
    """The right model and one with the same weights and another dropout, each over 48 seeds."""
    torch.manual_seed(0)
    right, other = Drops(), Drops(dropout)
    other.load_state_dict(right.state_dict())
    batch = Batch.of(torch.randn(16, 16))
    return sample_chances(right, right, batch, seeds=48), sample_chances(other, other, batch, seeds=48, first=1000)


def wrong(dropout):
    """Names of what differs."""
    return [leaf.name for leaf in compare_chances(*pair(dropout)) if problem(leaf)]


def own(y, p=0.25, scale=1 / 0.75):
    """Dropout that draws its numbers in another way."""
    return y * (torch.rand_like(y) >= p) * scale


SCATTERED = torch.randperm(512, generator=torch.Generator().manual_seed(0))


def masked(y, draws):
    """Dropout of what was drawn less than a quarter for, in memory order."""
    return y * (draws.view(y.shape) >= 0.25) / 0.75


FAULTS = {
    "off": (lambda y: y, "seeds"),
    "another rate": (lambda y: own(y, p=0.3, scale=1 / 0.7), "share of zeros of output"),
    "not scaled": (lambda y: own(y, scale=1.0), "scale of output"),
    "scaled by the rate": (lambda y: own(y, scale=1 / 0.25), "scale of output"),
    "one draw for four neighbours": (lambda y: masked(y, torch.rand(y.numel() // 4).repeat_interleave(4)),
                                     "zeros side by side of output"),
    "one draw for a column": (lambda y: masked(y, torch.rand(y.shape[-1]).repeat(len(y))),
                              "zeros one above the other of output"),
    "one draw for sixteen that are scattered": (lambda y: masked(y, torch.rand(32).repeat(16)[SCATTERED]),
                                                "share of zeros of output"),
    "always the same": (lambda y: y * (torch.arange(y.numel()).view(y.shape) % 4 > 0) / 0.75, "seeds"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_dropout_is_found(fault):
    """By what it does to every seed."""
    dropout, name = FAULTS[fault]
    assert name in wrong(dropout)


def test_other_numbers_of_the_same_kind_are_right():
    """No value agrees, every measure does."""
    assert wrong(own) == []


def test_a_seed_that_does_not_repeat_is_found():
    """A generator that goes on from call to call."""
    generator = torch.Generator().manual_seed(0)
    found = wrong(lambda y: y * (torch.rand(y.shape, generator=generator) >= 0.25) / 0.75)
    assert "seeds" in found


def test_inductors_own_random_numbers_are_right():
    """Without fallback_random: forward and backward."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, batch = Drops(), Batch.of(torch.randn(16, 16))
    compiled = torch.compile(model, backend="inductor")
    leaves = compare_chances(sample_chances(model, model, batch), sample_chances(compiled, model, batch))
    torch.compiler.reset()
    assert [problem(leaf) for leaf in leaves if problem(leaf)] == []
    assert "scale of gradient of linear.weight" in {leaf.name for leaf in leaves}


def test_an_error_on_one_side_is_told():
    """And nothing else."""

    def refuses(y):
        raise ValueError("planted")

    (leaf,) = compare_chances(*pair(refuses))
    assert "eager ran, compiled ValueError in forward: planted" in problem(leaf)


class Picks(nn.Module):
    """Draws whole numbers, as a sampler of tokens does; the tests spoil how."""

    def __init__(self, pick):
        super().__init__()
        self.pick = pick

    def forward(self, x):
        """A number for each row."""
        return self.pick(x)


def picked(pick):
    """Names of what differs from a right sampler; whether there was anything random."""
    batch = Batch.of(torch.zeros(64, 4))
    right, other = Picks(lambda x: torch.multinomial(x.softmax(-1), 1)), Picks(pick)
    eager = sample_chances(right, right, batch, train=False, seeds=48)
    compiled = sample_chances(other, other, batch, train=False, seeds=48, first=1000)
    return eager.varies, [leaf.name for leaf in compare_chances(eager, compiled) if problem(leaf)]


@pytest.mark.parametrize(("pick", "name"), [
    (lambda x: x.argmax(-1, keepdim=True), "seeds"),
    (lambda x: torch.multinomial((x + torch.arange(4.0)).softmax(-1), 1), "mean of output"),
])
def test_whole_numbers_that_are_drawn_are_compared(pick, name):
    """A model may return nothing but tokens."""
    varies, names = picked(pick)
    assert varies
    assert name in names


def test_whole_numbers_of_the_same_kind_are_right():
    """Drawn in another way."""
    assert picked(lambda x: (-torch.rand_like(x).log()).argmin(-1, keepdim=True)) == (True, [])


def test_whole_numbers_that_nobody_draws():
    """Which side of a tie they are on is another check's: here they must only not depend on the seed."""
    batch = Batch.of(torch.zeros(64, 4))
    one, two = Picks(lambda x: x.argmax(-1)), Picks(lambda x: x.argmax(-1) + 1)
    eager, compiled = (sample_chances(m, m, batch, train=False, seeds=4) for m in (one, two))
    leaves = compare_chances(eager, compiled)
    assert len(leaves) > 1
    assert not [leaf.name for leaf in leaves if problem(leaf)]


def running(values):
    """Moments of tensors that come one by one."""
    moments = Moments(values[0].clone())
    for value in values[1:]:
        moments.add(value)
    return moments


@pytest.mark.parametrize("seed", range(8))
def test_one_engine_for_numbers_and_tensors(seed):
    """Welch's t of numbers, as the standard library has it; of tensors the root of the summed ratio."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (4 * seed - 16)
    one = scale * torch.randn(12 + seed, 7, generator=generator, dtype=torch.float64)
    other = scale * (0.3 + torch.randn(12 + seed, 7, generator=generator, dtype=torch.float64))
    for column in range(7):
        mine, theirs = one[:, column].tolist(), other[:, column].tolist()
        error = math.sqrt(statistics.variance(mine) / len(mine) + statistics.variance(theirs) / len(theirs))
        expected = abs(statistics.fmean(mine) - statistics.fmean(theirs)) / error
        assert welch(Moments.of(mine), Moments.of(theirs)) == pytest.approx(expected, rel=1e-12)
        assert welch(running(one[:, column]), running(other[:, column])) == pytest.approx(expected, rel=1e-9)
    runs = len(one)
    distance = (one.mean(0) - other.mean(0)).square().sum()
    squares = (one - one.mean(0)).square().sum() + (other - other.mean(0)).square().sum()
    ratio = float(distance / (squares / (runs - 1) / runs))
    assert welch(running(one), running(other)) ** 2 == pytest.approx(ratio, rel=1e-9)


def test_means_that_nothing_varies():
    """Equal ones are 0 apart, others infinitely, unless some slack is given."""
    assert welch(Moments.of([2.0, 2.0]), Moments.of([2.0, 2.0])) == 0
    assert welch(Moments.of([2.0, 2.0]), Moments.of([3.0])) == math.inf
    assert welch(Moments.of([2.0, 2.0]), Moments.of([3.0]), slack=0.5) == 2


def test_variances_are_compared_in_standard_errors():
    """Normal samples of one variance are near each other, those of another are not; a heavy tail gets more room."""
    torch.manual_seed(0)
    far = []
    for power in (1, 3):
        one, other = (torch.randn(64).double().pow(power).tolist() for _ in range(2))
        assert variance_distance(one, other) < 4
        far.append(variance_distance(one, [4 * value for value in other]))
    assert far[0] > 6 > far[1]
    rare = [0.01 * place for place in range(56)]
    assert variance_distance([*rare, *[0.5] * 8], [*rare, *[100.0] * 8]) < 1
    assert variance_distance([1.0] * 64, [1.0 + 1e-7 * (number % 2) for number in range(64)]) < 1


class NormalisedBesideDropout(nn.Module):
    """One output is drawn; the other is normalised and is not: its mean is nothing but rounding."""

    def __init__(self, shift=0.0):
        super().__init__()
        self.norm, self.shift = nn.LayerNorm(32, elementwise_affine=False), shift

    def forward(self, x):
        steady = self.norm(x)
        if torch.compiler.is_compiling():
            # another order of rounding, and what is planted
            steady = (steady * 3) / 3 + self.shift
        return {"drawn": nn.functional.dropout(x, 0.25), "steady": steady}


@pytest.mark.parametrize(("shift", "wrong"), [(0.0, []), (0.01, ["mean of output['steady']"])])
def test_the_mean_of_a_normalised_output_is_compared_by_its_scale(shift, wrong):
    """Two means of 1e-9 are not thousands of standard errors apart; a hundredth of the scale is."""
    torch.manual_seed(0)
    module, batch = NormalisedBesideDropout(shift), Batch.of(torch.randn(8, 32))
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    eager_chances = sample_chances(module, module, batch, train=False, seeds=8)
    compiled_chances = sample_chances(compiled, module, batch, train=False, seeds=8, first=8)
    told = {leaf.name for leaf in compare_chances(eager_chances, compiled_chances) if leaf.message}
    assert {name for name in told if name.startswith("mean of output['steady']")} == set(wrong)
    assert bool(told) is bool(wrong), told


class NormalisedBehindDropout(nn.Module):
    """What is drawn is normalised, so its mean varies by rounding alone; compiled it is moved by a little more."""

    def __init__(self, moved):
        super().__init__()
        self.norm, self.moved = nn.LayerNorm(32, elementwise_affine=False), moved

    def forward(self, x):
        normalised = self.norm(nn.functional.dropout(x, 0.25))
        if torch.compiler.is_compiling():
            normalised = normalised + self.moved * torch.randn(())
        return normalised


@pytest.mark.parametrize(("moved", "wrong"), [(1e-7, []), (1e-3, ["mean of output"])])
def test_how_far_a_mean_varies_by_rounding_is_not_compared(moved, wrong):
    """A mean that varies by 1e-7 of its leaf's scale differs by the order of sums; by a thousandth it is drawn."""
    torch.manual_seed(0)
    module, batch = NormalisedBehindDropout(moved), Batch.of(torch.randn(8, 32))
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    eager_chances = sample_chances(module, module, batch, train=False, seeds=64)
    compiled_chances = sample_chances(compiled, module, batch, train=False, seeds=64, first=64)
    told = [leaf for leaf in compare_chances(eager_chances, compiled_chances) if leaf.message]
    assert [leaf.name for leaf in told] == wrong
    assert all("varies over 64 seeds" in leaf.message for leaf in told)


class Normalised(nn.Module):
    """The gradient of the convolution's bias is zero but for rounding: the norm behind it takes the mean off."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(F.dropout(self.norm(self.conv(x)).relu(), 0.25, True).mean((2, 3)))


def normalised_pair(name, factor):
    """The model, and one whose gradient of that parameter is so many times as large."""
    torch.manual_seed(0)
    right, other = Normalised(), Normalised()
    other.load_state_dict(right.state_dict())
    other.get_parameter(name).register_hook(lambda gradient: gradient * factor)
    batch = Batch.of(torch.randn(4, 3, 8, 8))
    return sample_chances(right, right, batch, seeds=48), sample_chances(other, other, batch, seeds=48, first=1000)


def test_a_gradient_that_is_rounding_has_no_scale_to_compare():
    """Another order of sums rounds by another amount, of which each seed shows as much."""
    eager, compiled = normalised_pair("conv.bias", 1.6)
    assert 0 < eager.scale_of("gradient of conv.bias") < 1e-8
    leaves = compare_chances(eager, compiled)
    assert [leaf.name for leaf in leaves if problem(leaf)] == []
    assert "scale of gradient of norm.bias" in {leaf.name for leaf in leaves}


@pytest.mark.parametrize(("name", "factor"), [("conv.bias", 1e4), ("conv.weight", 1.6), ("norm.bias", 1.6)])
def test_a_gradient_of_a_wrong_scale_is_told_beside_one_that_is_rounding(name, factor):
    """Also where eager's is rounding and compiled's is not."""
    wrong_names = [leaf.name for leaf in compare_chances(*normalised_pair(name, factor)) if problem(leaf)]
    assert f"scale of gradient of {name}" in wrong_names
