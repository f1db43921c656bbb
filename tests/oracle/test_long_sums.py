"""Sums over many terms: a loop that adds one after the other is off as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile import CompileConfig, compare
from pytest_torchcompile.faults.fault_parts import change_output
from pytest_torchcompile.oracle.operator_rounding import sum_roundings

pytestmark = pytest.mark.needs_torch


class Means(nn.Module):
    """Over the outer axes of ``(B, S, D)``: a loop of Inductor's adds them up one by one."""

    def forward(self, x):
        return x.mean((0, 1)), (x * 0.3 + 0.1).mean((0, 1)), (x * x).sum(0)


@pytest.mark.parametrize("shape", [(16, 256, 64), (4, 4096, 64)])
def test_sums_over_many_terms_are_no_false_alarm(shape):
    """Inductor was up to 11 times the noise off for random numbers of one sign."""
    torch.manual_seed(0)
    comparison = compare(Means(), [(torch.rand(shape),)], CompileConfig(enabled=True, backend="inductor"))
    assert comparison.ok, comparison.problems


def test_a_wrong_sum_is_caught():
    """By a ten-thousandth."""
    torch.manual_seed(0)
    wrong = change_output(lambda y: y * 1.0001)()
    comparison = compare(Means(), [(torch.rand(16, 256, 64),)], CompileConfig(enabled=True, backend=wrong))
    assert "value" in {problem.kind for problem in comparison.problems}


def test_a_long_sum_rounds_as_a_whole():
    """By the root of its terms; other operators, products and short sums do not."""
    long, short = torch.ones(1024, 2), torch.ones(4, 2)
    assert sum_roundings("sum", (long, [0])) == 8
    assert sum_roundings("sum", (short, [0])) == 0
    assert sum_roundings("mm", (long.T, long)) == 0
    assert sum_roundings("native_layer_norm", (long, [2])) == 0


def test_a_loss_is_a_sum_where_it_reduces():
    """Over all of its elements; its backward adds up nothing."""
    long = torch.ones(1024, 2)
    assert sum_roundings("mse_loss", (long, long)) == 2048**0.5 / 4
    assert sum_roundings("mse_loss", (long, long, 0)) == 0
    assert sum_roundings("mse_loss_backward", (long, long, long, 1)) == 0
