"""Sums of terms that repeat: another order of summation is as right, and by no more than it is really off."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pytest_torchcompile import CompileConfig, compare, zoo
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.faults.fault_parts import change_output
from pytest_torchcompile.oracle import reference
from pytest_torchcompile.oracle.summation_orders import LOOPS, OtherOrder

pytestmark = pytest.mark.needs_torch
EXCUSED = "excused, since terms of a sum repeat"


class Means(nn.Module):
    """Of 4,096 equal numbers that float32 does not hold exactly, over the outer axis."""

    def forward(self, x):
        return (x * 0.3 + 0.1).mean(0)


class Counts(nn.Module):
    """Whole numbers, which float32 adds exactly in each order, and some that repeat."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def forward(self, x):
        return self.values(x).mean(0)


class Normed(nn.Module):
    """By the statistics of the batch."""

    def forward(self, x):
        return F.batch_norm(x, None, None, training=True)


def compared(model, x, backend="inductor"):
    return compare(model, [(x,)], CompileConfig(enabled=True, backend=backend), train=False)


def test_a_mean_of_equal_numbers_is_no_false_alarm_and_is_told():
    """Inductor's loop is 46 times the noise off."""
    found = compared(Means(), torch.ones(4096, 64))
    assert found.ok, found.problems
    assert any(note.startswith("output: ") and EXCUSED in note for note in found.notes)


def test_images_of_zeros_are_no_false_alarm():
    """Behind a convolution's bias a batch norm sees one number; eleven leaves were accused."""
    torch.manual_seed(0)
    found = compare(zoo.conv_net(), [(torch.zeros(4, 3, 32, 32),)], CompileConfig(enabled=True, backend="inductor"))
    assert found.ok, found.problems


@pytest.mark.parametrize("error", [1e-3, 1e-1])
def test_a_wrong_mean_of_equal_numbers_is_caught(error):
    """No order of summation is so far off."""
    wrong = change_output(lambda y: y * (1 + error))()
    assert not compared(Means(), torch.ones(4096, 64), wrong).ok


@pytest.mark.parametrize("values", [
    lambda x: (x > 0).float(),
    lambda x: F.one_hot((x[:, 0] > 0).long(), 2).float(),
    lambda x: (x.clamp(0, 1) * 255).round() / 255,
    lambda x: x.clamp(-0.3, 0.3),
    lambda x: x.masked_fill(x > 0, float("-inf")).softmax(-1),
], ids=["counts", "one-hot", "quantised", "clamped", "masked"])  # fmt: skip
@pytest.mark.parametrize("error", [1e-3, 1e-1])
def test_other_sums_of_values_that_repeat_hide_nothing(values, error):
    torch.manual_seed(0)
    wrong = change_output(lambda y: y * (1 + error))()
    assert not compared(Counts(values), torch.randn(4096, 8), wrong).ok


def test_a_batch_norm_of_constants_hides_no_error_of_a_tenth():
    """Its output is the rounding of its mean, over the root of eps."""
    wrong = change_output(lambda y: y + 0.1)()
    assert not compared(Normed(), torch.full((8, 8, 28, 28), 0.3), wrong).ok


def test_of_terms_that_differ_nothing_is_added_up_otherwise():
    """Nor of short sums, of none, of whole numbers' dtypes, and of half precision."""
    torch.manual_seed(0)
    for terms in (torch.randn(4096), torch.ones(8), torch.ones(0, 4), torch.ones(4096, dtype=torch.int64),
                  torch.ones(4096, dtype=torch.bfloat16)):
        with OtherOrder(1) as mode:
            terms.sum(0)
        assert not mode.changed


def test_a_loop_adds_in_the_dtype_itself():
    """One number after the other, so that all of float32's roundings are in it."""
    one = torch.tensor(0.4)
    total = torch.zeros(())
    for _ in range(4096):
        total = total + one
    with OtherOrder(1) as mode:
        found = [one.expand(4096).sum(), one.expand(4096, 3).sum(0)[1], one.expand(3, 4096).sum(1, keepdim=True)[1, 0]]
    assert mode.changed
    assert [float(each) for each in found] == [float(total)] * 3
    assert float(total) != pytest.approx(1638.4, abs=1e-3)


def test_shapes_and_exact_sums_stay():
    """In each number of loops; a sum that float32 holds exactly has no other order."""
    ones = torch.ones(6, 100, 2)
    for loops in LOOPS:
        with OtherOrder(loops):
            assert torch.equal(ones.sum(), torch.tensor(1200.0))
            assert torch.equal(ones.sum((0, 2), keepdim=True), torch.full((1, 100, 1), 12.0))
            assert torch.equal(ones.mean(1), torch.ones(6, 2))
            assert torch.equal(ones.var(1), torch.zeros(6, 2))


def test_what_no_other_order_could_make_is_asked_of_eager_once():
    """Six runs where a sum has terms that repeat, and one where none has."""
    for values, draws in ((torch.ones(4096, 4) * 0.3, len(LOOPS)), (torch.rand(4096, 4), None)):
        found = reference(Means(), Batch.of(values), train=False, draw=False).other_orders("output")
        assert (found and found.draws) == draws
    assert reference(Means(), Batch.of(values), train=False, draw=False).other_orders("no such leaf") is None
