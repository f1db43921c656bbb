"""Random models, broken in different ways: whatever fails, the state is bitwise that of a run without compiler."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from pytest_torchcompile import CompileConfig, maybe_compile, zoo

pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]
WIDTH = 8


class Counter(nn.Module):
    """Writes to a buffer in each call, and reads it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        return x * (1 + self.seen / 10)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x) * torch.randn(())


class Break(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class InPlace(nn.Module):
    """Writes to a tensor of its own that is no buffer, and to its input's copy."""

    def __init__(self):
        super().__init__()
        self.cache = torch.zeros(WIDTH)

    def forward(self, x):
        self.cache.copy_(x.detach().sum(0))
        x = x.clone()
        x.mul_(2)
        return x + self.cache


PARTS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH), "norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH), "dropout": lambda: nn.Dropout(0.3), "relu": nn.ReLU,
    "counter": Counter, "noise": Noise, "break": Break, "in place": InPlace,
    "residual": lambda: Residual(nn.Linear(WIDTH, WIDTH)), "head": lambda: zoo.TinyHead(WIDTH, WIDTH),
    "experts": lambda: zoo.MoELite(WIDTH), "expert": lambda: zoo.Expert(WIDTH),
}  # fmt: skip


class Chain(nn.Module):
    """One part after the other. No loop: a break in one would give up the whole frame, and half a call is the point."""

    def __init__(self, names):
        super().__init__()
        self.part = PARTS[names[0]]()
        self.rest = Chain(names[1:]) if names[1:] else nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.part(x)
        return self.rest(x)


def compile_error(number):
    count = []

    def backend(graph, inputs):
        count.append(1)
        if len(count) == number:
            raise RuntimeError("planted: compile")
        return graph.forward

    return backend


def run_error(number):
    """The first run of one of the graphs raises, half-way: everything is written and drawn."""
    count = []

    def backend(graph, inputs):
        count.append(1)
        if len(count) != number:
            return graph.forward

        def run(*args):
            graph(*args)
            raise RuntimeError("planted: run")

        return run

    return backend


def backward_error(number):
    count = []

    def backward(graph, inputs):
        count.append(1)
        if len(count) == number:
            raise RuntimeError("planted: backward")
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=backward)


def state(model, output, optimizer):
    """Everything that a later step could depend on."""
    return {
        "output": output.detach(), "state": dict(model.state_dict()),
        "gradients": [p.grad for p in model.parameters()],
        "optimizer": [list(optimizer.state[p].values()) for p in model.parameters() if p in optimizer.state],
        "caches": [part.cache for part in model.modules() if isinstance(part, InPlace)],
        "training": [part.training for part in model.modules()],
        "torch": torch.get_rng_state(), "python": random.getstate(),
    }  # fmt: skip


def train(model, call, sizes):
    """Steps of training; the state after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    for size in sizes:
        output = call(torch.randn(size, WIDTH))
        optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()
        yield copy.deepcopy(state(model, output, optimizer))


NAMES = st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=3)
FAULTS = st.sampled_from([compile_error, run_error, backward_error])


def agrees(names, backend, dynamic=False, sizes=(3, 5)):
    """Train beside eager, the second step with another shape; the state must be the same bits after each step."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Chain(names)
    eager = copy.deepcopy(model)
    compiled = maybe_compile(model, CompileConfig(enabled=True, backend=backend, dynamic=dynamic))
    for expected, found in zip(list(train(eager, eager, sizes)), train(model, compiled, sizes), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("models", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_state_after_a_failed_attempt_is_bitwise_what_it_was(attempts, models):
    """At compile, at run, in backward; in the first graph or a later one, which may be that of the second shape."""

    @settings(max_examples=models)
    @given(names=NAMES, fault=FAULTS, number=st.integers(1, 3), dynamic=st.sampled_from([False, False, False, None]))
    def check(names, fault, number, dynamic):
        agrees(names, fault(number), dynamic)

    check()
    assert attempts("result").count("fallback_eager") > models / 2
    assert set(attempts("phase")) == {"build", "call", "backward"}


def test_that_test_can_fail(attempts, monkeypatch):
    """Without the copies that are put back."""
    monkeypatch.setattr("pytest_torchcompile.layer.graph_effects.Before.restore", lambda self: None)
    with pytest.raises(AssertionError):
        agrees(["counter"], run_error(1))


@settings(max_examples=25)
@given(names=NAMES, fault=FAULTS)
def test_state_after_a_failed_healthcheck_is_bitwise_what_it_was(names, fault):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Chain(names)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    output = model(torch.randn(3, WIDTH))
    output.sum().backward()
    optimizer.step()
    before = copy.deepcopy(state(model, output, optimizer))
    config = CompileConfig(enabled=True, backend=fault(1), smoketest_steps=1)
    maybe_compile(model, config, sample_batch=torch.ones(3, WIDTH))
    torch.testing.assert_close(state(model, output, optimizer), before, rtol=0, atol=0)
