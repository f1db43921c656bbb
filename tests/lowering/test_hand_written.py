"""A Triton kernel behind a custom op, compiled: opaque, so what follows it is a kernel of its own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from pytest_torchcompile import zoo
from pytest_torchcompile.errors import Unavailable
from pytest_torchcompile.explain import explain

pytestmark = pytest.mark.needs_torch


class Fused(torch.nn.Module):
    def forward(self, x, y):
        return silu(x) * y + 1


class ByHand(torch.nn.Module):
    def forward(self, x, y):
        from pytest_torchcompile.zoo.gated_unit import gate

        return gate(x, y) + 1


def test_what_each_touches():
    """Inductor's kernel touches three tensors; an op and the kernel behind it five, and none stays inside."""
    try:
        zoo.triton_op("cpu")
    except Unavailable as why:
        pytest.skip(str(why))
    x, y = torch.randn(300), torch.randn(300)
    with torch.no_grad():
        fused, by_hand = (explain(model, ((x, y), {}), train=False) for model in (Fused(), ByHand()))
        torch.testing.assert_close(Fused()(x, y), ByHand()(x, y))
    (kernel,) = fused.kernels
    assert [operator.original.split(".")[1] for operator in kernel.operators][-2:] == ["mul", "add"]
    assert len(kernel.reads) + len(kernel.writes) == 3
    assert kernel.kept_inside
    op, added = by_hand.kernels
    assert "gate" in op.name
    assert (op.kind, op.library) == ("extern", "custom op")
    assert len(op.reads) + len(op.writes) + len(added.reads) + len(added.writes) == 5
    assert not added.kept_inside
