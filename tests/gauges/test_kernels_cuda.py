"""Did it fuse? What every engineer expects of Inductor on a GPU, counted by the profiler, held by a limit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_torchcompile.checks import load
from pytest_torchcompile.gauges.kernels import aten_operators, count_launches, read_kernels
from pytest_torchcompile.ledger import observe

pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, when Inductor and CUDA are first used
]


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def both(call, *args):
    """Kernels that a GPU runs in one call, eagerly and compiled, and what Inductor generated."""
    with torch.no_grad(), observe(keep_texts=True) as seen:
        compiled = torch.compile(call)
        for _ in range(2):
            call(*args), compiled(*args)
        eager, fused = (count_launches(lambda f=f: f(*args)) for f in (call, compiled))
        torch.testing.assert_close(compiled(*args), call(*args), rtol=2e-2, atol=2e-2)
    (found,) = read_kernels(seen.texts, aten_operators())
    return eager, fused, found


def draw(*shape, dtype=torch.float32):
    """Standard normal numbers on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=dtype)


def test_a_pointwise_chain_is_one_kernel():
    """Five operators."""
    eager, fused, found = both(lambda x, y: (((x + y) * 2).relu() - y).tanh(), draw(512, 512), draw(512, 512))
    assert (eager.kernels, fused.kernels) == (5, 1)
    assert [set(kernel.ops) for kernel in found.generated] == [{"add", "mul", "relu", "sub", "tanh"}]


def test_a_pointwise_operator_and_a_reduction_are_one_kernel():
    """Rows that fit into a block."""
    eager, fused, _ = both(lambda x: (x.exp() * 2).sum(-1), draw(512, 256))
    assert (eager.kernels, fused.kernels) == (3, 1)


def test_softmax_is_one_kernel():
    """A reduction that is used again in the same row."""
    _, fused, found = both(lambda x: (x * 3).softmax(-1), draw(512, 256))
    assert fused.kernels == 1
    assert len(found.generated) == 1


def test_norm_and_residual_are_one_kernel():
    """The addition before a layer norm."""
    norm = nn.LayerNorm(256).cuda()
    eager, fused, found = both(lambda x, y: norm(x + y), draw(512, 256), draw(512, 256))
    assert (eager.kernels, fused.kernels) == (2, 1)
    assert {"add", "native_layer_norm"} <= set(found.generated[0].ops)


def test_a_product_and_its_activation():
    """The product stays a library call, or a template when tuned; bias and activation are one kernel behind it."""
    layer = nn.Linear(256, 512).cuda().bfloat16()
    eager, fused, found = both(lambda x: F.gelu(layer(x)), draw(512, 256, dtype=torch.bfloat16))
    assert fused.kernels <= 2 <= eager.kernels
    assert sum(found.library.values()) == 1
    assert len(found.generated) == 1


def test_attention_stays_one_library_call():
    """Inductor does not take scaled_dot_product_attention apart."""
    q, k, v = (draw(2, 4, 128, 64, dtype=torch.bfloat16) for _ in range(3))
    _, fused, found = both(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
    assert fused.kernels == 1
    assert not found.generated
    assert sum(found.fallbacks.values()) == 1
    assert "scaled_dot_product" in next(iter(found.fallbacks))


def test_what_did_not_fuse_is_over_the_limit():
    """Planted: an operator that Inductor has no code for, in the middle of a chain."""
    _, fused, _ = both(lambda x: torch.kthvalue(x + 1, 3, dim=-1).values * 2 - 1, draw(64, 64))
    eager, _, _ = both(lambda x: x + 1, draw(64, 64))
    section = {"raised": None, "graphs": [], "launches": {
        "call": "call 1", "eager": eager.to_dict(), "compiled": fused.to_dict()}}
    assert fused.kernels > 1
    (problem,) = load("kernels").judge(section, {"launches": 1})
    assert f"in a compiled step (call 1): {fused.kernels}, at most 1 allowed" in problem.message
