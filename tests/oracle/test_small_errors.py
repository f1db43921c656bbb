"""Elements that are off, but by less than one eps of the leaf's largest value, excuse no shift of all the others."""

from __future__ import annotations

import pytest
import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Leaf, Limits, Reference, problem, record
from pytest_torchcompile.oracle.judging import judge_numbers

pytestmark = pytest.mark.needs_torch
COUNT, FEW, SIGMA, DRAWS = 1024, 32, 1e-4, 36


def told_of(shift: float) -> str | None:
    """The verdict where a few small elements are 10 times their noise off, and all others ``shift`` times theirs."""
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
    leaf = judge_numbers(leaf, eager.float(), compiled.float(), expected, Limits())
    assert leaf.bias > Limits().of(COUNT)[1]
    return problem(leaf, Limits())


def test_a_few_small_elements_are_excused():
    """As of a function that is approximated to an absolute error."""
    assert told_of(0.1) is None


def test_a_shift_of_all_others_is_not():
    """Each is off by a quarter of its noise: together 6 times what noise explains, below the usual limit of 8."""
    assert "a systematic offset" in (told_of(0.25) or "")
