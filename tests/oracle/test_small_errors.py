"""Elements that are off, but by less than one eps of the leaf's largest value, excuse no shift of all the others."""

from __future__ import annotations

import pytest
import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Leaf, Limits, Reference, problem, record
from pytest_torchcompile.oracle.judging import judge_numbers, judge_values

pytestmark = pytest.mark.needs_torch
COUNT, FEW, SIGMA, DRAWS = 1024, 32, 1e-4, 36


def leaf_shifted_by(shift: float) -> Leaf:
    """The leaf where a few small elements are 10 times their noise off, and all others ``shift`` times theirs."""
    torch.manual_seed(0)
    exact = torch.ones(COUNT, dtype=torch.float64)
    exact[:FEW] = 1e-4
    expected = Reference(record(lambda x: x, None, Batch.of(exact), train=False))
    expected.kind = "float64"
    estimate = expected.estimates["output"]
    for _ in range(DRAWS):
        estimate.add(exact * (1 + SIGMA * torch.randn_like(exact)))
        estimate.offered += 1
    relative = torch.full_like(exact, shift)
    relative[:FEW] = 10.0
    eager = exact * (1 + SIGMA * torch.randn_like(exact))
    compiled = exact * (1 + SIGMA * relative)
    leaf = Leaf("output", "value", numel=COUNT, dtype="torch.float32")
    return judge_numbers(leaf, eager.float(), compiled.float(), expected, Limits())


def told_of(shift: float) -> str | None:
    """The verdict on such a leaf."""
    leaf = leaf_shifted_by(shift)
    assert leaf.bias is not None
    assert leaf.bias > Limits().of(COUNT)[1]
    return problem(leaf, Limits())


def test_a_few_small_elements_are_excused():
    """As of a function that is approximated to an absolute error."""
    assert told_of(0.1) is None


def test_a_shift_of_all_others_is_not():
    """Each is off by a quarter of its noise: together 6 times what noise explains, below the usual limit of 8."""
    assert "a systematic offset" in (told_of(0.25) or "")


@pytest.mark.parametrize(("worst", "wrong"), [(0.5, False), (1.0, False), (3.0, False), (5.0, True)])
def test_in_a_leaf_of_noise_the_worst_element_is_held_against_eagers_own(worst, wrong):
    """Eager has an element that is 300 times as far off as the others, and compiled has one elsewhere."""
    torch.manual_seed(0)
    eager, compiled, *drawn = (1e-9 * torch.randn(40_000, dtype=torch.float64) for _ in range(6))
    eager[17], compiled[42] = 3e-7, worst * 3e-7
    expected = Reference(record(lambda x: x, None, Batch.of(torch.zeros_like(eager)), train=False))
    expected.kind = "float64"
    estimate = expected.estimates["output"]
    for value in drawn:
        estimate.add(value)
        estimate.offered += 1
    leaf = judge_values("output", "gradient", eager.float(), compiled.float(), expected, Limits())
    assert not leaf.decided
    assert leaf.beside_own == pytest.approx(worst, rel=1e-3)
    assert leaf.peak > 128
    assert leaf.rms < 16
    assert (problem(leaf) is not None) == wrong


def test_a_leaf_that_means_something_is_not():
    leaf = leaf_shifted_by(0.1)
    assert leaf.decided
    assert leaf.beside_own is None
