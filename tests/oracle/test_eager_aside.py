"""A leaf of which eager is a little aside of what is expected, all one way: compiled code may be where eager is."""

from __future__ import annotations

import pytest
import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Leaf, Limits, Reference, problem, record
from pytest_torchcompile.oracle.judging import judge_numbers

pytestmark = pytest.mark.needs_torch
SIGMA, ASIDE, DRAWS = 1e-6, 8.0, 36


def judged(compiled_at: float) -> tuple[Leaf, str | None]:
    """The verdict on compiled values so many times the noise away from what is expected, eager being at 8."""
    torch.manual_seed(0)
    exact = torch.ones(4096, dtype=torch.float64)

    def noisy(place: float) -> torch.Tensor:
        return exact + SIGMA * (place + torch.randn_like(exact))

    expected = Reference(record(lambda x: x, None, Batch.of(exact), train=False))
    expected.kind = "float64"
    estimate = expected.estimates["output"]
    for _ in range(DRAWS):
        estimate.add(noisy(0.0))
        estimate.offered += 1
    leaf = Leaf("output", "value", numel=4096, dtype="torch.float32")
    leaf = judge_numbers(leaf, noisy(ASIDE).float(), noisy(compiled_at).float(), expected, Limits())
    return leaf, problem(leaf, Limits())


@pytest.mark.parametrize(("compiled_at", "against"), [(0.0, "float64"), (ASIDE, "eager")])
def test_compiled_code_may_be_near_one_of_the_two(compiled_at, against):
    leaf, told = judged(compiled_at)
    assert told is None
    assert leaf.against == against


@pytest.mark.parametrize("compiled_at", [-ASIDE, 2 * ASIDE, 3 * ASIDE])
def test_and_nowhere_else(compiled_at):
    assert judged(compiled_at)[1] is not None
