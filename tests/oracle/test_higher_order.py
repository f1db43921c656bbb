"""Operators of a higher order: models that branch or loop by torch's own operators are judged like all others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pytest_torchcompile import CompileConfig, compare
from pytest_torchcompile.errors import Unavailable
from pytest_torchcompile.oracle.noise import Wide
from pytest_torchcompile.oracle.tape import Tape

pytestmark = pytest.mark.needs_torch


class Branches(nn.Module):
    """A branch with a weight of its own, and numbers that round."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        hidden = self.linear(x)
        return torch.cond(hidden.sum() > 0, lambda z: (z.softmax(-1) + 1,), lambda z: (z.exp() * 2,), (hidden,))[0]


class Loops(nn.Module):
    def forward(self, x):
        from torch._higher_order_ops.while_loop import while_loop

        start = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin() * 1.5), (start, x))[1]


class Flex(nn.Module):
    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(x, x * 2, x + 1)


CALLS = [torch.randn(4, 6), torch.randn(4, 6)]


def off_by_a_thousandth(graph, example_inputs):
    def run(*args):
        return tuple(value * 1.001 if torch.is_tensor(value) and value.is_floating_point() else value
                     for value in graph(*args))

    return run


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(("model", "calls", "train"), [
    (Branches, CALLS, True), (Loops, CALLS, False),
    pytest.param(Flex, [torch.randn(2, 2, 16, 16)], False,
                 marks=pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")),
])
def test_it_is_the_same_computation(model, calls, train, backend):
    torch.manual_seed(0)
    found = compare(model(), calls, CompileConfig(backend=backend), train=train)
    assert found.ok, str(found)


@pytest.mark.parametrize("model", [Branches, Loops])
def test_a_wrong_result_is_told(model):
    torch.manual_seed(0)
    found = compare(model(), CALLS, CompileConfig(backend=off_by_a_thousandth), train=False)
    assert not found.ok
    assert {problem.kind for problem in found.problems} == {"value"}


def test_what_a_branch_computes_rounds_like_all_else():
    """Its operators are seen by the tape, run in float64, and rounded at random."""
    torch.manual_seed(0)
    model, x = Branches(), CALLS[0]
    with torch.no_grad():
        with Tape() as tape:
            expected = model(x)
        names = {name for name, _shapes in tape.roundings}
        assert any("softmax" in name for name in names) or any("exp" in name for name in names)
        with Wide(torch.float64, tape):
            wide = model.double()(x.double())
        with Wide(torch.float64, tape, factor=1.0, unit=2.0**-24):
            noisy = model(x.double())
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), expected)
    assert 0 < float((noisy - wide).abs().max()) < 1e-5


class Single(Branches):
    """As most write it: functions that return a tensor, of which torch has no gradients under a dispatch mode."""

    def forward(self, x):
        hidden = self.linear(x)
        return torch.cond(hidden.sum() > 0, lambda z: z.sin(), lambda z: z.cos(), (hidden,))


@pytest.mark.filterwarnings("ignore")
def test_gradients_that_torch_refuses_under_a_mode_are_no_error_of_the_model():
    """Without a mode it has them, in a process of its own too, so it is nothing that the model raises."""
    alone = "from test_higher_order import CALLS, Single; Single()(CALLS[0]).sum().backward()"
    done = subprocess.run([sys.executable, "-c", alone], cwd=Path(__file__).parent, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(Unavailable) as refused:
        compare(Single(), CALLS, CompileConfig(backend="aot_eager"), train=True)
    assert str(refused.value) == (
        "torch has no gradients of an operator such as torch.cond while each operator is watched, as a comparison does "
        "(TypeError: object of type 'bool' has no len()); have its functions return a tuple, `(x,)`, or take phase "
        "inference")
    assert compare(Single(), CALLS, CompileConfig(backend="aot_eager"), train=False).ok
