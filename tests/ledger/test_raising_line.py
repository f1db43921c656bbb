"""The user's line of an operator that raised inside of a compiled graph."""

from __future__ import annotations

import linecache

import pytest
import torch

from pytest_torchcompile.ledger.break_sites import raising_line

pytestmark = pytest.mark.needs_torch


@torch.library.custom_op("raising_line::widen", mutates_args=())
def widen(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x], 1)


@widen.register_fake
def _(x):
    return torch.empty_like(x)  # planted: half as wide as what comes


class Net(torch.nn.Module):
    def forward(self, x):
        wide = widen(x.sin())
        return wide.view(wide.shape[0] * wide.shape[1])  # raises in the graph, whose size is a constant


def test_the_line_is_that_of_the_model():
    torch.compiler.reset()
    x = torch.ones(3, 4)
    assert Net()(x).shape == (24,)
    with pytest.raises(RuntimeError) as raised:
        torch.compile(Net(), backend="aot_eager", dynamic=False)(x)
    file, line, source = raising_line(raised.value)
    assert source.startswith("return wide.view(")
    assert linecache.getline(__file__, line).strip().startswith("return wide.view(")
    assert __file__.endswith(file)


def test_an_error_outside_of_graphs_has_none():
    with pytest.raises(ValueError, match="mine") as raised:
        raise ValueError("mine")
    assert raising_line(raised.value) is None
    assert raising_line(None) is None
