"""Library operators: one table, for what eager computes and for the kernels that a GPU ran."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from pytest_torchcompile.explain import explain
from pytest_torchcompile.gauges.library_operators import calls_library
from pytest_torchcompile.gauges.step_work import measure_work

pytestmark = pytest.mark.needs_torch


def test_all_whose_flops_torch_knows_are_among_them():
    # The others are operators of a higher order.
    names = {packet._qualified_op_name for packet in flop_registry if isinstance(packet, torch._ops.OpOverloadPacket)}
    assert len(names) > 10
    assert [name for name in sorted(names) if not calls_library(name)] == []


@pytest.mark.parametrize(("call", "library"), [
    (lambda a, b: torch.mm(a, b) + 1, True), (lambda a, b: torch.mv(a, b[0]) + 1, False),
    (lambda a, b: torch.dot(a[0], b[0]) + 1, False), (lambda a, b: torch.vdot(a[0], b[0]) + 1, False),
    (lambda a, b: torch.addmv(a[0], a, b[0]) + 1, False), (lambda a, b: torch.cdist(a, b, p=1.0) + 1, True),
    (lambda a, b: a.sin() + b, False),
])
def test_what_stays_a_call_when_compiled(call, library):
    """As Inductor makes it, so it is told of eager's step."""
    given = torch.randn(8, 8), torch.randn(8, 8)
    with torch.no_grad():
        work, explained = measure_work(lambda: call(*given)), explain(call, given)
    assert any(kernel.kind in ("library", "extern") for kernel in explained.kernels) == library
    assert any(operator.library for operator in work.operators) == library
