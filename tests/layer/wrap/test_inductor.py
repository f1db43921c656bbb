"""Real Inductor, broken by torch's own injectors: refused to compile, raising when run, wrong."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import nn

from pytest_torchcompile import CompileConfig, maybe_compile

pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor's CPU backend needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning"),
]
X = torch.linspace(-1, 1, 32).view(4, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        return torch.relu(self.layer(x)) + self.seen


@pytest.fixture
def injected():
    """Plant a bug into the C++ code of relu; caches would keep what was made without it."""
    import torch._inductor.config as config

    def plant(kind):
        return config.patch({"cpp.inject_relu_bug_TESTING_ONLY": kind, "force_disable_caches": True})

    return plant


def test_nothing_planted(attempts):
    model = Net()
    compiled = maybe_compile(model, CompileConfig(enabled=True, smoketest_steps=1), sample_batch=X)
    assert compiled is not model
    assert attempts("result") == ["compiled"]


RAISING = [("compile_error", "CppCompileError"), ("runtime_error", "unhandled error")]


@pytest.mark.parametrize(("kind", "reason"), [*RAISING, ("accuracy", "times the rounding noise")])
def test_the_healthcheck_finds_it(attempts, injected, kind, reason):
    model = Net()
    with injected(kind):
        assert maybe_compile(model, CompileConfig(enabled=True, smoketest_steps=1), sample_batch=X) is model
    assert attempts("result") == ["fallback_eager"]
    assert reason in attempts("reason")[0]
    assert float(model.seen) == 0


@pytest.mark.parametrize(("kind", "reason"), RAISING)
def test_without_a_healthcheck_the_first_call_falls_back(attempts, injected, kind, reason):
    model = Net()
    eager = copy.deepcopy(model)
    with injected(kind):
        compiled = maybe_compile(model, CompileConfig(enabled=True))
        for _ in range(2):
            torch.testing.assert_close(compiled(X), eager(X), rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=0, atol=0)
    assert attempts("result") == ["deferred", "fallback_eager"]
    assert reason in attempts("reason")[1]


@pytest.mark.parametrize("backend", ["relu_compile_error_TESTING_ONLY", "relu_runtime_error_TESTING_ONLY"])
def test_torchs_own_broken_backends(attempts, backend):
    model = Net()
    eager = copy.deepcopy(model)
    compiled = maybe_compile(model, CompileConfig(enabled=True, backend=backend))
    for _ in range(2):
        torch.testing.assert_close(compiled(X), eager(X), rtol=0, atol=0)
    assert attempts("result") == ["deferred", "fallback_eager"]
    assert maybe_compile(eager, CompileConfig(enabled=True, backend=backend), sample_batch=X) is eager
