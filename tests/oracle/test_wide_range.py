"""A leaf whose values are of very different sizes: the noise of the largest excuses nothing of the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Tape, compare, problem, record, reference
from pytest_torchcompile.oracle.noise_levels import Projections, levels_of

pytestmark = pytest.mark.needs_torch


class Masked(nn.Module):
    """Some 64 numbers about one, the last of them beside a number as large as a mask is. (B, 8) -> (B, 64)."""

    def __init__(self, mask):
        super().__init__()
        self.linear = nn.Linear(8, 64)
        self.register_buffer("mask", torch.zeros(64))
        self.mask[-1], self.size = 1.0, mask

    def forward(self, x):
        """Scores, and the mask by its size."""
        return torch.tanh(self.linear(x)) + self.mask * self.size


def wrong_leaves(model, batch, fault):
    """The names of the leaves that are wrong where a fault changes the output."""
    def faulty(x):
        y = model(x)
        return y + fault(y)

    tape = Tape()
    eager, compiled = record(model, model, batch, train=False, mode=tape), record(faulty, model, batch, train=False)
    leaves = compare(eager, compiled, lambda: reference(model, batch, train=False, tape=tape, draw=False))
    return [leaf.name for leaf in leaves if problem(leaf)]


def one_element(y):
    """A hundredth of a percent of one element about one."""
    change = torch.zeros_like(y)
    change[0, 3] = 1e-4 * y[0, 3]
    return change


def the_largest(y):
    """The largest element is twice what it should be."""
    change = torch.zeros_like(y)
    change[0, -1] = y[0, -1]
    return change


def rounding(y):
    """Every other element is the next number."""
    change = torch.zeros_like(y)
    change[:, ::2] = torch.nextafter(y[:, ::2], torch.zeros(())) - y[:, ::2]
    return change


SIZES = [(torch.float32, 1.0), (torch.float32, -1e9), (torch.float32, 1e30), (torch.float32, -1.7e38),
         (torch.float64, 1e30), (torch.float64, 1e160), (torch.float64, -1e300)]


@pytest.mark.parametrize("fault", [one_element, the_largest])
@pytest.mark.parametrize(("dtype", "size"), SIZES, ids=str)
def test_a_fault_beside_a_large_value_is_found(dtype, size, fault):
    """In float64 squares of noise are beyond the range from 1e170 on; in float32 it has more than 64 binary places."""
    torch.manual_seed(0)
    model, batch = Masked(size).to(dtype), Batch.of((torch.randn(16, 8, dtype=dtype),))
    assert "output" in wrong_leaves(model, batch, fault)


@pytest.mark.parametrize(("dtype", "size"), SIZES, ids=str)
def test_rounding_beside_a_large_value_is_none(dtype, size):
    """The clean twin."""
    torch.manual_seed(0)
    model, batch = Masked(size).to(dtype), Batch.of((torch.randn(16, 8, dtype=dtype),))
    assert not wrong_leaves(model, batch, rounding)


class Chosen(nn.Module):
    """A scatter that keeps the largest: its backward looks for elements that equal it. (B, 6) -> (B, 6) in bfloat16."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        """Each row's largest element takes part in the first column's."""
        y = self.linear(x).bfloat16()
        y = y + y / (y.square() + 1)
        return y.scatter_reduce(1, y.argmax(1, keepdim=True), y[:, :1], "amax")


class ChosenOtherwise(Chosen):
    """The same sum, rounded elsewhere on its way back."""

    def forward(self, x):
        """A product with a reciprocal, and not a quotient."""
        y = self.linear(x).bfloat16()
        y = y + y * (y.square() + 1).reciprocal()
        return y.scatter_reduce(1, y.argmax(1, keepdim=True), y[:, :1], "amax")


class ChosenWrongly(Chosen):
    """Off by a tenth of what is added."""

    def forward(self, x):
        """One quotient is too small."""
        y = self.linear(x).bfloat16()
        y = y + 0.9 * y / (y.square() + 1)
        return y.scatter_reduce(1, y.argmax(1, keepdim=True), y[:, :1], "amax")


@pytest.mark.parametrize(("other", "is_wrong"), [(ChosenOtherwise, False), (ChosenWrongly, True)])
def test_what_is_chosen_by_a_scatter_does_not_round(other, is_wrong):
    """With noise on it no element was equal any more, the gradient of every draw 0 / 0, and its noise nothing."""
    torch.manual_seed(0)
    model, compiled_model, batch = Chosen(), other(), Batch.of((torch.randn(8, 6),))
    compiled_model.load_state_dict(model.state_dict())
    tape = Tape()
    eager, compiled = record(model, model, batch, mode=tape), record(compiled_model, compiled_model, batch)
    expected = reference(model, batch, tape=tape)
    leaves = compare(eager, compiled, expected)
    wrong = [leaf.name for leaf in leaves if problem(leaf)]
    assert bool(wrong) == is_wrong, wrong
    spread = expected.estimates["gradient of linear.bias"].spread
    assert spread is not None
    assert bool((spread > 0).all())


class Small(nn.Module):
    """(B, 8) -> (B, 8) of about ``size``."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        """Products alone: nothing is lost on the way."""
        return x.sin() * self.size


def flushed(y):
    """Subnormals are zeros, as in kernels of a GPU."""
    return torch.where(y.abs() < torch.finfo(y.dtype).tiny, -y, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_subnormals_that_are_flushed_are_right(dtype):
    torch.manual_seed(0)
    model, batch = Small(1e-38), Batch.of((torch.randn(16, 8, dtype=dtype),))
    assert flushed(model(*batch.args)).any()
    assert not wrong_leaves(model, batch, flushed)


def test_small_normal_numbers_have_to_be_right():
    """A tenth of 1e-33 is eight times what is excused."""
    torch.manual_seed(0)
    batch = Batch.of((torch.randn(16, 8),))
    assert "output" in wrong_leaves(Small(1e-33), batch, lambda y: 0.1 * y)
    assert "output" in wrong_leaves(Small(1e-33), batch, lambda y: -y)


class Eighth(nn.Module):
    """(B, 8) -> (B, 8) in 8 bits, below that dtype's smallest normal number."""

    def forward(self, x):
        """Whole steps of subnormals."""
        return (x.sin() * 0.014).to(torch.float8_e4m3fn)


def test_subnormals_of_8_bits_have_to_be_right():
    """Their smallest normal number is 0.016: what is below it is in daily use."""
    torch.manual_seed(0)
    model, batch = Eighth(), Batch.of((torch.randn(16, 8),))

    def halved(x):
        return (model(x).float() / 2).to(torch.float8_e4m3fn)

    eager, compiled = record(model, model, batch, train=False), record(halved, model, batch, train=False)
    leaves = compare(eager, compiled, lambda: reference(model, batch, train=False, draw=False))
    assert "output" in [leaf.name for leaf in leaves if problem(leaf)]


@pytest.mark.parametrize("number", [1e200, float("inf")])
def test_sums_whose_squares_have_no_end(number):
    """Special numbers all over a tensor leave such sums; Python raises OverflowError for their squares."""
    sums = Projections(levels_of(torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)))
    sums.add_sums(1.0, number, number, 1.0, 4)
    assert (sums.along_values, sums.along_constant) == pytest.approx((1e300, 1e300 / 4))
