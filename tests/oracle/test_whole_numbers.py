"""Whole numbers that a model counts with: nothing rounds, so noise may not flip what is compared with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile import CompileConfig, compare
from pytest_torchcompile.oracle.operator_rounding import operator_facts
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.oracle.whole_numbers import rounds_nothing

pytestmark = pytest.mark.needs_torch
aten = torch.ops.aten


class FromTheThird(nn.Module):
    """Lets through what comes from the third marked row on. Noise would have that count below three, or above."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x, marked):
        gate = marked.cumsum(0) >= 3
        return self.lin(x) * gate[:, None]


class OneRowMore(torch.autograd.Function):
    """The gradient of one row, a third too large."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        factors = torch.ones(len(gradient), 1)
        factors[3] = 1.3
        return gradient * factors


def wrong_backend(graph, example):
    def run(*inputs):
        return tuple(OneRowMore.apply(out) if out.requires_grad else out for out in graph(*inputs))

    return run


@pytest.mark.parametrize(("backend", "is_right"), [(wrong_backend, False), ("aot_eager", True)])
def test_a_count_at_its_threshold_excuses_nothing(backend, is_right):
    torch.manual_seed(0)
    x, marked = torch.randn(12, 8), (torch.rand(12) < 0.7).float()
    found = compare(FromTheThird(), [(x, marked)], CompileConfig(enabled=True, backend=backend), locate=False)
    assert found.ok is is_right
    assert not any("excused" in text for text in found.notes)


WHOLE, HALVES = torch.arange(12.0).reshape(3, 4), torch.full((3, 4), 0.5)


@pytest.mark.parametrize(("operator", "args", "kwargs", "is_exact"), [
    (aten.cumsum.default, (WHOLE, 0), {}, True),
    (aten.sum.dim_IntList, (WHOLE, [1]), {}, True),
    (aten.mm.default, (WHOLE, WHOLE.t()), {}, True),
    (aten.addmm.default, (WHOLE[:, :3], WHOLE, WHOLE.t()), {"beta": 2}, True),
    (aten.scatter_add.default, (WHOLE, 0, torch.zeros(3, 4, dtype=torch.int64), WHOLE), {}, True),
    (aten.add.Tensor, (WHOLE, torch.ones(4, dtype=torch.int64)), {}, True),
    (aten.mul.Tensor, (WHOLE, -3), {}, True),
    # A factor that is no whole number, though the result is one.
    (aten.add.Tensor, (WHOLE * 10, WHOLE * 10), {"alpha": 0.1}, False),
    (aten.mul.Tensor, (WHOLE * 10, 0.1), {}, False),
    (aten.add.Tensor, (HALVES, HALVES), {}, False),
    # One element of the result, or of what it was made from.
    (aten.add.Tensor, (WHOLE, torch.tensor([1.0, 1.0, 1.0, 1.5])), {}, False),
    # It overwrites what it has read.
    (aten.add_.Tensor, (WHOLE.clone(), WHOLE), {}, False),
    # No sum, and a mean of whole numbers.
    (aten.exp.default, (torch.zeros(3),), {}, False),
    (aten.mean.dim, (WHOLE, [0]), {}, False),
    # 12 terms of up to 22 are more than the 256 that bfloat16 counts to, and 2**24 is where float32 stops counting.
    (aten.sum.default, (2 * WHOLE.bfloat16(),), {}, False),
    (aten.sum.default, (torch.ones(3, dtype=torch.bfloat16),), {}, True),
    (aten.mul.Tensor, (torch.full((2,), 4096.0), torch.full((2,), 4096.0)), {}, False),
    (aten.add.Tensor, (torch.full((2,), float("inf")), torch.ones(2)), {}, False),
    (aten.add.Tensor, (torch.ones(0), torch.ones(0)), {}, False),
    (aten.add.Tensor, (torch.ones(2, device="meta"), torch.ones(2, device="meta")), {}, False),
    (aten.mul.Tensor, (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64)), {}, False),
])  # fmt: skip
def test_which_calls_round_nothing(operator, args, kwargs, is_exact):
    assert rounds_nothing(operator_facts(operator), args, kwargs, operator(*args, **kwargs)) is is_exact


def test_the_coarsest_call_of_an_operator_counts():
    """Of two calls with the same shapes one rounds: then noise is drawn for both."""
    for second, unit in ((WHOLE, 0.0), (WHOLE / 3, 2.0**-24)):
        with Tape() as tape:
            WHOLE.cumsum(0)
            second.cumsum(0)
        (rounding,) = [each for (name, _), each in tape.roundings.items() if name == "cumsum"]
        assert rounding.unit == unit
