"""What the zygote's warm-up runs before it forks."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config

from pytest_torchcompile import observe
from pytest_torchcompile.gauges import compiler

pytestmark = pytest.mark.needs_torch


@pytest.fixture
def ran_backward(monkeypatch):
    """One entry for each backward pass."""
    passes = []
    real = torch.autograd.graph._engine_run_backward

    def counted(*args, **kwargs):
        passes.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", counted)
    return passes


@pytest.mark.parametrize(("build", "trains"), [({}, True), ({"cuda": "13.0"}, False), ({"hip": "7.0"}, False),
                                               ({"xpu": "20250101"}, False)])
def test_a_backward_pass_only_in_a_build_for_cpus(monkeypatch, ran_backward, build, trains):
    """In any other it starts threads that do not survive a fork; the forward pass is compiled everywhere."""
    for gpu in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, gpu, build.get(gpu), raising=False)
    with config.patch(compile_threads=1), observe() as seen:
        compiler.pay_first_compile()
    assert bool(ran_backward) is trains
    assert [graph.runs for graph in seen.graphs] == [1]
