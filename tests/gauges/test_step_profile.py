"""Step profile: kernels are operator calls that compute, and every second of a step has its place."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from pytest_torchcompile.gauges.step_profile import profile_step

pytestmark = pytest.mark.needs_torch
X = torch.randn(8, 16)


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("step", "kernels"), [
    (lambda: X.t().view(16, 8)[1:].detach(), 0),  # views
    (lambda: torch.empty(3), 0),
    (lambda: X.reshape(-1).contiguous(), 0),  # calls nothing that computes
    (lambda: torch.nn.functional.linear(X, X), 1),  # addmm or mm, with views around it
    (lambda: torch.relu(X).mul(2).add_(1), 3),
    (lambda: torch.nn.functional.layer_norm(X, (16,)), 1),
    (lambda: X.t().reshape(-1), 1),  # here it copies
])
def test_kernels_are_operators_that_compute(step, kernels):
    profile = profile_step(step)
    assert (profile.kernels, profile.kernels_in_graphs) == (kernels, 0)


def test_what_runs_in_a_graph_is_told_from_what_runs_outside():
    """The backend `eager` calls the model's own operators, in the graph."""
    @torch.compile(backend="eager")
    def f(x):
        return torch.relu(x @ x.t()).sum()

    f(X)
    profile = profile_step(lambda: f(X).mul(2))
    assert (profile.kernels, profile.kernels_in_graphs) == (1, 3)
    assert sum(profile.library_calls.values()) == 3
    assert profile.guards > 0


def test_a_backward_pass_in_a_graph_is_in_the_graph():
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    compiled = torch.compile(net, backend="aot_eager")
    compiled(X).sum().backward()
    profile = profile_step(lambda: compiled(X).sum().backward())
    assert "aten::tanh_backward" in profile.library_calls


def test_the_parts_add_up():
    @torch.compile(backend="eager")
    def f(x):
        return torch.relu(x @ x.t()).sum()

    def step():
        time.sleep(0.02)
        return f(X).mul(2)

    f(X)
    profile = profile_step(step)
    parts = ("library", "generated", "operators", "guards", "python")
    assert sum(map(profile.share, parts)) == pytest.approx(1, abs=0.01)
    assert profile.share("python") > 0.5
