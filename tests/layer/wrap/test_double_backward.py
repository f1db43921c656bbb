"""The derivative of a gradient, which AOTAutograd refuses: computed eagerly, or refused in words."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pytest_torchcompile import CannotFallBack, CompileConfig, CompileFailed, maybe_compile

pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]


class Net(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.first, self.second, self.breaks = nn.Linear(4, 4), nn.Linear(4, 1), breaks
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x, y):
        hidden = torch.tanh(self.first(x)) * y
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(hidden.sin()) * self.scale, hidden.mean()


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 1), nn.Dropout()

    def forward(self, x, y):
        return torch.tanh(self.dropout(self.layer(x))), y.mean()


def batch(seed, size=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator).requires_grad_(), torch.randn(size, 4, generator=generator)


def penalized(model, seed, size=3, before=lambda x: x * 2):
    """A step with a gradient penalty; everything that comes out of it."""
    x, y = batch(seed, size)
    model.zero_grad()
    out, mean = model(before(x), y)  # the compiled function's input is no leaf
    (slope,) = torch.autograd.grad(out.sum() + mean, x, create_graph=True)
    (slope.square().sum() + out.mean()).backward()
    return [out, slope, x.grad, *(p.grad for p in model.parameters())]


def on(**given):
    return CompileConfig(enabled=True, **{"backend": "aot_eager", **given})


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("breaks", [False, True])
def test_a_gradient_penalty(attempts, backend, breaks):
    """Every step raised a RuntimeError."""
    model = Net(breaks)
    eager = copy.deepcopy(model)
    compiled = maybe_compile(model, on(backend=backend))
    for seed in range(3):
        torch.testing.assert_close(penalized(compiled, seed), penalized(eager, seed))
    assert attempts("result") == ["deferred", "compiled", "fallback_eager"]
    assert attempts("phase")[-1] == "backward"
    assert "does not support double backward" in attempts("reason")[-1]


def test_in_a_later_step_of_another_size_under_autocast(attempts):
    model = Net()
    eager = copy.deepcopy(model)
    compiled = maybe_compile(model, on(), sample_batch=batch(0))
    for size in (3, 5, 6):
        for each in (eager, compiled):
            each.zero_grad()
            each(*batch(1, size))[0].sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = 2, 6, lambda x: x
        torch.testing.assert_close(penalized(compiled, *given), penalized(eager, *given), rtol=2e-2, atol=2e-2)
    assert attempts("result") == ["compiled", "fallback_eager"]


def test_third_derivatives(attempts):
    model = Net()
    eager = copy.deepcopy(model)
    compiled = maybe_compile(model, on())
    found = []
    for each in (eager, compiled):
        x, y = batch(0)
        derivative = each(x, y)[0].sum()
        for _ in range(3):
            (derivative,) = torch.autograd.grad(derivative.sum(), x, create_graph=True)
        found.append(derivative)
    torch.testing.assert_close(found[1], found[0])


def test_create_graph_alone_costs_nothing(attempts):
    """Nobody differentiates the gradient, so compiled code stays."""
    model = Net()
    eager = copy.deepcopy(model)
    compiled, found = maybe_compile(model, on()), []
    for each in (eager, compiled):
        x, y = batch(0)
        found.append(torch.autograd.grad(each(x, y)[0].sum(), x, create_graph=True)[0])
    torch.testing.assert_close(found[1], found[0])
    assert attempts("result") == ["deferred", "compiled"]



@pytest.mark.parametrize("make", [Drops, Net])
def test_what_cannot_be_computed_again_is_refused(attempts, make):
    """Random numbers are gone; and a parameter was written to between forward and backward."""
    compiled = maybe_compile(model := make(), on())
    x, y = batch(0)
    out, _ = compiled(x, y)
    if make is Net:
        with torch.no_grad():
            model.second.bias.add_(1)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    text = (r"does not support double backward.* the gradient of this step was differentiated, and the call cannot be "
            r"computed again: it draws random numbers, writes to its inputs, or they are gone or changed")
    with pytest.raises(CannotFallBack, match=text):
        slope.square().sum().backward()
    assert attempts("result") == ["deferred", "compiled", "cannot_fall_back"]
    penalized(compiled, 1)
    assert len(attempts()) == 3, "the step can be tried again, eagerly"


def test_an_input_that_nobody_holds_is_refused(attempts):
    """Under autocast compiled code saves another tensor, and to keep this one would cost memory in every step."""
    compiled = maybe_compile(Net(), on())
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(CannotFallBack, match="or they are gone"):
        penalized(compiled, 0)
    penalized(compiled, 0)


def test_fail_policy_raise(attempts):
    compiled = maybe_compile(Net(), on(fail_policy="raise"))
    with pytest.raises(CompileFailed, match="does not support double backward"):
        penalized(compiled, 0)


def test_inputs_live_no_longer_for_it(attempts):
    """What a call was given is held weakly, but for parameters."""
    import weakref

    compiled = maybe_compile(Net(), on())
    x, y = batch(0)
    out, _ = compiled(x, y)
    known = weakref.ref(y)
    loss = out.sum()
    loss.backward()
    del y
    assert known() is None
    assert loss.grad_fn is not None


def test_what_a_call_was_given_is_remembered_without_a_call_for_each_parameter(count_calls):
    """Asking each of 120 parameters what it is took 28 microseconds."""
    counted = []
    for count in (2, 8):
        compiled = maybe_compile(nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)]), on())
        for _ in range(3):
            compiled(torch.ones(2, 4))
        counted.append(count_calls("double_backward.py", lambda run=compiled: run(torch.ones(2, 4))))
    assert 0 < counted[0] == counted[1]
