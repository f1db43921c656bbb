"""Activation checkpointing: a recompute is never other code than its forward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_torchcompile import CannotFallBack, CompileConfig, maybe_compile, observe

pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]
REENTRANT = pytest.mark.parametrize("reentrant", [False, True])


@pytest.fixture(autouse=True)
def device_state():
    """Torch refuses a checkpoint in whose forward pass CUDA is first initialised, as it is by a first compile."""
    if torch.cuda.is_available():
        torch.cuda.init()


class Block(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.layer, self.breaks = nn.Linear(4, 4), breaks

    def forward(self, x):
        y = torch.tanh(self.layer(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return y * torch.rand_like(y)


def rows(count):
    return torch.linspace(-1, 1, count * 4).view(count, 4).requires_grad_()


class Refuses:
    """A backend that compiles all graphs but one."""

    def __init__(self, number):
        self.number, self.count = number, 0

    def __call__(self, graph, inputs):
        self.count += 1
        if self.count == self.number:
            raise RuntimeError("planted: does not compile")
        return graph.forward


def on(backend):
    return CompileConfig(enabled=True, backend=backend)


def step(model, count, reentrant, times=1):
    """A training step through ``times`` checkpointed calls; the gradients."""
    torch.manual_seed(0)
    x = rows(count)
    for _ in range(times):
        x = checkpoint(model, x, use_reentrant=reentrant)
    x.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return grads


@REENTRANT
@pytest.mark.parametrize("times", [1, 3])
def test_compiled_code_runs_in_both_passes(attempts, reentrant, times):
    model = Block()
    expected = step(copy.deepcopy(model), 2, reentrant, times)
    compiled = maybe_compile(model, on("eager"))
    step(compiled, 2, reentrant, times)
    with observe() as seen:
        found = step(compiled, 2, reentrant, times)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert sum(graph.runs for graph in seen.graphs) == 2 * times
    assert attempts("result") == ["deferred", "compiled"]


@REENTRANT
def test_a_first_call_that_fails_falls_back_before_anything_ran_compiled(attempts, reentrant):
    model = Block()
    expected = step(copy.deepcopy(model), 2, reentrant)
    compiled = maybe_compile(model, on(Refuses(1)))
    for _ in range(2):
        torch.testing.assert_close(step(compiled, 2, reentrant), expected, rtol=0, atol=0)
    assert attempts("result") == ["deferred", "fallback_eager"]


@REENTRANT
def test_a_later_step_that_fails_falls_back_when_nothing_is_left_to_recompute(attempts, reentrant):
    """The reentrant variant compiles twice: without gradients for the forward pass, with them for the recompute."""
    model = Block()
    expected = step(copy.deepcopy(model), 3, reentrant)
    compiled = maybe_compile(model, on(Refuses(3 if reentrant else 2)))
    step(compiled, 2, reentrant)
    torch.testing.assert_close(step(compiled, 3, reentrant), expected, rtol=0, atol=0)
    assert attempts("result") == ["deferred", "compiled", "fallback_eager"]


def test_earlier_calls_that_will_be_recomputed_forbid_it(attempts):
    model = maybe_compile(Block(), on(Refuses(2)))
    x = checkpoint(model, rows(2), use_reentrant=False)
    with pytest.raises(CannotFallBack, match=r"1 earlier call\(s\) ran compiled under activation checkpointing"):
        checkpoint(model, rows(3), use_reentrant=False)
    x.sum().backward()
    assert attempts("result") == ["deferred", "compiled", "cannot_fall_back"]


def test_a_call_half_of_which_ran_compiled_forbids_it(attempts):
    model = maybe_compile(Block(breaks=True), on(Refuses(2)))
    with pytest.raises(CannotFallBack, match="part of this call has run compiled already"):
        checkpoint(model, rows(2), use_reentrant=False)
    assert attempts("result") == ["deferred", "cannot_fall_back"]


def test_a_recompute_that_fails_is_raised(attempts):
    """The reentrant variant compiles once more for the recompute, which has gradients."""
    model = maybe_compile(Block(), on(Refuses(2)))
    x = checkpoint(model, rows(2), use_reentrant=True)
    with pytest.raises(CannotFallBack, match="activation checkpointing recomputes a forward pass that ran compiled"):
        x.sum().backward()


def test_a_recompute_that_raises_when_it_runs_is_raised(attempts):
    runs = []

    def second_run_raises(graph, inputs):
        def run(*args):
            runs.append(1)
            if len(runs) == 2:
                raise RuntimeError("planted")
            return graph(*args)

        return run

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.layer(x))

    model = maybe_compile(Plain(), on(second_run_raises))
    x = checkpoint(model, rows(2), use_reentrant=False)
    with pytest.raises(CannotFallBack, match="recomputes a forward pass that ran compiled"):
        x.sum().backward()


def test_calls_without_gradients_are_no_checkpointing(attempts):
    """Serving: a failure for a new shape falls back, whatever was called before."""
    compiled = maybe_compile(Block(), on(Refuses(2)))
    with torch.no_grad():
        compiled(rows(2).detach())
        compiled(rows(3).detach())
    assert attempts("result") == ["deferred", "compiled", "fallback_eager"]


def test_a_checkpoint_inside_of_the_model_is_torchs_own_business(attempts):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = Block(), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(checkpoint(self.block, x, use_reentrant=False))

    model = Model()
    compiled = maybe_compile(model, on(Refuses(1)))
    eager = copy.deepcopy(model)
    for each in (eager, compiled):
        torch.manual_seed(0)
        each(rows(2)).sum().backward()
    grads = [[p.grad for p in each.parameters()] for each in (model, eager)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    assert attempts("result") == ["deferred", "fallback_eager"]
