"""copy_model: copies that share nothing with their model, also where it is a function or has patched methods."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import nn

from pytest_torchcompile.state.model_copy import Closure, copy_model

pytestmark = pytest.mark.needs_torch

GLOBAL_NET = nn.Linear(2, 2)
GLOBAL_SCALE = torch.ones(1)


def uses_a_global(x):
    return GLOBAL_NET(x)


def calls_one_that_uses_a_global(x):
    return uses_a_global(x) * GLOBAL_SCALE


def uses_a_global_inside(x):
    def inner(y):
        return GLOBAL_NET(y)

    return inner(x)


def doubled(x):
    return 2 * x


def is_apart(copy, net):
    """Whether writing to all parameters of the copy leaves the original as it was."""
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(1)
    return all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def over(net):
    return lambda x: net(x)


def over_a_list(net):
    nets = [net]
    return lambda x: nets[0](x)


def over_a_dict(net):
    nets = {"a": (net,)}
    return lambda x: nets["a"][0](x)


def over_a_function(net):
    inner = over(net)
    return lambda x: inner(x)


def as_partial(net):
    return functools.partial(lambda model, x: model(x), net)


def as_keyword(net):
    return functools.partial(lambda x, model: model(x), model=net)


def as_method(net):
    return net.forward


class Caller:
    def __init__(self, net):
        self.net = net

    def __call__(self, x):
        return self.net(x)


@pytest.mark.parametrize("make", [over, over_a_list, over_a_dict, over_a_function, as_partial, as_keyword, as_method,
                                  Caller], ids=lambda make: make.__name__)
def test_a_function_is_copied_with_what_it_reaches(make):
    """Its module shows up as a submodule, and the copy runs a copy of it."""
    net = nn.Linear(2, 2)
    closure = Closure(make(net))
    assert list(closure.parameters())
    x = torch.ones(1, 2)
    expected = net(x)
    twin = copy_model(closure)
    assert torch.equal(twin(x), expected)
    assert is_apart(twin, net)
    # The parameters of the copy are those that it runs with.
    assert not torch.equal(twin(x), expected)
    assert torch.equal(closure(x), expected)


@pytest.mark.parametrize("function", [uses_a_global, calls_one_that_uses_a_global, uses_a_global_inside],
                         ids=lambda function: function.__name__)
def test_globals_are_copied(function):
    """Those that the function uses, itself, in a function that it calls, or in one that it makes."""
    x = torch.ones(1, 2)
    expected = function(x)
    twin = copy_model(Closure(function))
    assert is_apart(twin, GLOBAL_NET)
    assert not torch.equal(twin(x), expected)
    assert torch.equal(function(x), expected)


def test_the_names_of_modules():
    """By the variable that holds them, as a report prints them."""
    net, nets = nn.Linear(2, 2), [nn.Linear(2, 2)]

    def forward(x):
        return nets[0](net(x))

    assert sorted(name for name, _ in Closure(forward).named_parameters()) == [
        "net.bias", "net.weight", "nets[0].bias", "nets[0].weight"]


def test_a_function_without_state_is_copied_as_it_is():
    """There is nothing to be kept apart."""
    twin = copy_model(Closure(doubled))
    assert twin(torch.ones(1)).item() == 2
    assert twin.__dict__["function"] is doubled


def test_a_patched_method():
    """A function in an attribute is bound to the copy, as the original's is to the original."""
    net = nn.Linear(2, 2)
    plain = net.forward
    net.forward = lambda x: plain(x) + 1
    twin = copy_model(net)
    x = torch.ones(1, 2)
    expected = net(x)
    assert torch.equal(twin(x), expected)
    assert is_apart(twin, net)
    assert not torch.equal(twin(x), expected)


def test_a_function_that_reaches_itself():
    """A cell that leads back to the function ends there."""
    net = nn.Linear(2, 2)

    def forward(x, depth=1):
        return forward(net(x), depth - 1) if depth else net(x)

    x = torch.ones(1, 2)
    twin = copy_model(Closure(forward))
    assert torch.equal(twin(x), forward(x))
    assert is_apart(twin, net)


def clip_in_place(weight):
    weight.grad.clamp_(max=0.5)


class Clipped(nn.Module):
    """Clips a gradient by a hook on the parameter."""

    def __init__(self, accumulated):
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)
        self.hooked = 0
        if accumulated:
            self.inner.weight.register_post_accumulate_grad_hook(clip_in_place)
        else:
            self.inner.weight.register_hook(lambda grad: grad.clamp(max=0.5))

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("accumulated", [False, True], ids=["hook", "hook after the gradient"])
def test_hooks_of_parameters(accumulated):
    """``copy.deepcopy`` leaves them out."""
    twin = copy_model(Clipped(accumulated))
    twin(10 * torch.ones(1, 2)).sum().backward()
    assert twin.inner.weight.grad.max() == 0.5


def test_empty_registries_are_the_copys_own():
    """A hook of either model is not the other's; what two modules share stays shared in the copy."""
    model, shared = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {}
    model[0].notes = model[1].notes = shared
    called = []
    copied = copy_model(model)
    copied[0].register_forward_hook(lambda *given: called.append("copy"))
    model[1].register_forward_pre_hook(lambda *given: called.append("model"))
    copied[0].notes["copy"] = 1
    assert copied[1].notes == {"copy": 1}
    assert not shared
    model(torch.ones(1, 2))
    assert called == ["model"]
    copied(torch.ones(1, 2))
    assert called == ["model", "copy"]


def test_parameters_may_be_shared():
    """By a memo; they have their hooks already."""
    net = Clipped(False)
    shared = {id(parameter): parameter for parameter in net.parameters()}
    twin = copy_model(net, shared)
    assert twin.inner.weight is net.inner.weight
    twin(10 * torch.ones(1, 2)).sum().backward()
    assert net.inner.weight.grad.max() == 0.5


def test_what_cannot_be_copied():
    """The error is copy.deepcopy's own."""
    net = nn.Linear(2, 2)
    net.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
        copy_model(net)


def test_a_module_that_would_be_shared():
    """Who changes the copy would change the original: that is no copy."""
    net = nn.Linear(2, 2)
    net.lock = threading.Lock()

    def forward(x):
        return net(x)

    with pytest.raises(TypeError, match=r"forward.* reaches a module that can't be copied"):
        copy_model(Closure(forward))


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse [A-Z]{3} tensor support is in beta state:UserWarning")
def test_what_is_sparse_by_rows_or_columns_is_copied(layout):
    """``copy.deepcopy`` raises for them. One that has two names is one tensor in the copy, too."""
    model = nn.Linear(3, 3)
    model.register_buffer("graph", torch.eye(3).to_sparse(layout=layout))
    model.register_buffer("same", model.graph)
    model.kept = {"plain": torch.eye(3).to_sparse(layout=layout)}
    copied = copy_model(model)
    assert copied.graph is copied.same
    assert copied.kept["plain"] is not model.kept["plain"]
    assert copied.graph.layout is layout
    copied.graph.values().fill_(7)
    assert torch.equal(model.graph.to_dense(), torch.eye(3))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse [A-Z]{3} tensor support is in beta state:UserWarning")
def test_sparse_parameters_are_copied(layout):
    """``copy.deepcopy`` raises for them, too."""
    model = nn.Linear(3, 3)
    model.graph = nn.Parameter(torch.eye(3).to_sparse(layout=layout), requires_grad=False)
    copied = copy_model(model)
    assert type(copied.graph) is nn.Parameter
    assert not copied.graph.requires_grad
    assert torch.equal(copied.graph.to_dense(), torch.eye(3))
    assert "graph" in dict(copied.named_parameters())
    copied.graph.detach().mul_(7)
    assert torch.equal(model.graph.to_dense(), torch.eye(3))
