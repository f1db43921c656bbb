"""StateSnapshot: what a call has changed is put back into the very same objects; what is the model's history stays."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch
from torch import nn

from pytest_torchcompile.state.snapshot import StateSnapshot, changed_names, copy_state, generator_state

pytestmark = pytest.mark.needs_torch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.cache = torch.zeros(3)
        self.kept = [torch.zeros(1)]
        self.table = {"a": torch.zeros(1)}
        self.queue = deque([torch.zeros(1)])
        self.calls = 0
        self.names = ["x"]
        self.dice = random.Random(1)


def replaced_parameter(net):
    net.inner.weight = nn.Parameter(torch.ones(2, 2))


def deleted_buffer(net):
    del net.mean


def added_buffer(net):
    net.register_buffer("more", torch.ones(1))


def written(net):
    with torch.no_grad():
        net.inner.weight.add_(1)
        net.mean.add_(1)
        net.cache.add_(1)
        net.kept[0].add_(1)


def switched_modes(net):
    net.inner.eval()


def frozen(net):
    net.inner.weight.requires_grad_(False)


def tied_to_a_graph(net):
    net.mean.add_(net.inner.weight[0])


def replaced_attribute(net):
    net.cache = torch.ones(3)


def added_attribute(net):
    net.fresh = torch.ones(1)


def deleted_attribute(net):
    del net.cache


def longer_list(net):
    net.kept.append(torch.ones(1))


def other_order(net):
    net.table["b"] = net.table.pop("a")


def longer_queue(net):
    net.queue.appendleft(torch.ones(1))


CHANGES = [replaced_parameter, deleted_buffer, added_buffer, written, switched_modes, frozen, tied_to_a_graph,
           replaced_attribute, added_attribute, deleted_attribute, longer_list, other_order, longer_queue]


def seen(net):
    """All that must return: values, objects, flags and the keys of tables."""
    tensors = {name: (id(tensor), tensor.tolist(), tensor.requires_grad)
               for name, tensor in (*net.named_parameters(), *net.named_buffers())}
    attributes = [(name, id(value)) for name, value in vars(net).items() if isinstance(value, torch.Tensor)]
    contents = [[id(each) for each in container] for container in (net.kept, net.queue, net.table.values())]
    values = [tensor.tolist() for tensor in (net.kept[0], *net.table.values(), *net.queue)]
    return tensors, attributes, contents, values, list(net.table), [part.training for part in net.modules()]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_put_back(change):
    """Compiled code has guarded on these objects, so they return, not only their values."""
    net = Net()
    before = seen(net)
    snapshot = StateSnapshot(net)
    change(net)
    snapshot.restore()
    assert seen(net) == before


def test_history_stays():
    """Counters and lists without tensors are the model's own."""
    net = Net()
    snapshot = StateSnapshot(net)
    net.calls, net.other = 3, "text"
    net.names.append("y")
    snapshot.restore()
    assert (net.calls, net.other, net.names) == (3, "text", ["x", "y"])


def test_history_is_put_back_where_asked():
    net = Net()
    snapshot = StateSnapshot(net)
    before = net.calls
    net.calls, net.other = 3, None
    net.names.append("y")
    snapshot.restore(counters=True)
    assert (net.calls, net.names, hasattr(net, "other")) == (before, ["x"], False)


def test_a_buffer_made_in_inference_mode():
    """Torch lets nobody write to it outside of that."""
    net = torch.nn.BatchNorm1d(2)
    with torch.inference_mode():
        net.running_mean = torch.ones(2)
    snapshot = StateSnapshot(net)
    with torch.inference_mode():
        net.running_mean.zero_()
    snapshot.restore()
    assert net.running_mean.tolist() == [1, 1]


def test_an_expanded_tensor():
    """Torch lets nobody write to one place in memory twice."""
    net = Net()
    net.cache = torch.ones(1).expand(3)
    net.register_buffer("scale", torch.ones(2, 1).expand(2, 3))
    snapshot = StateSnapshot(net)
    net.cache[:1].zero_()
    net.scale[:, :1].zero_()
    snapshot.restore()
    assert net.cache.tolist() == [1, 1, 1]
    assert net.scale.sum() == 6
    assert (net.cache.stride(), net.scale.stride()) == ((0,), (1, 0))


def test_gradients_are_dropped():
    """Each call begins without them."""
    net = Net()
    snapshot = StateSnapshot(net)
    net.inner(torch.ones(2)).sum().backward()
    snapshot.restore()
    assert net.inner.weight.grad is None


def test_generators_of_modules():
    """They draw the same numbers again; ``changed`` tells that something was drawn."""
    net = Net()
    snapshot, state = StateSnapshot(net), generator_state(net.dice)
    first = net.dice.random()
    assert state.changed()
    snapshot.restore()
    assert not state.changed()
    assert net.dice.random() == first


@pytest.mark.parametrize("make", [
    lambda: torch.Generator().manual_seed(1), lambda: random.Random(1),
    lambda: pytest.importorskip("numpy").random.RandomState(1),
    lambda: pytest.importorskip("numpy").random.default_rng(1),
], ids=["torch", "Python", "NumPy's old", "NumPy"])
def test_kinds_of_generators(make):
    """Each library's own way to read and to write the state."""
    generator = make()

    def draw():
        if isinstance(generator, torch.Generator):
            return torch.rand(1, generator=generator).item()
        return generator.random()

    state = generator_state(generator)
    first = draw()
    assert state.changed()
    state.restore()
    assert draw() == first


@pytest.mark.parametrize("value", [random.SystemRandom(), 3, "text", torch.ones(1)])
def test_no_generator(value):
    """What asks the operating system has no state either."""
    assert generator_state(value) is None


def test_tied_parameters_are_one():
    """After the restoration as before."""
    net = Net()
    net.inner.bias = nn.Parameter(torch.zeros(2))
    net.twin = nn.Linear(2, 2)
    net.twin.weight = net.inner.weight
    snapshot = StateSnapshot(net)
    with torch.no_grad():
        net.twin.weight.add_(1)
    snapshot.restore()
    assert net.twin.weight is net.inner.weight


def test_a_plain_function_has_no_state():
    """A snapshot of nothing puts nothing back."""
    StateSnapshot(None).restore()


@pytest.mark.parametrize(("change", "named"), [
    (written, ["inner.weight", "mean", "cache"]), (switched_modes, ["inner.training"]), (lambda net: None, []),
    (deleted_buffer, ["mean"]), (added_buffer, ["more"]), (deleted_attribute, ["attribute cache"]),
], ids=["written", "modes", "nothing", "deleted", "added", "deleted attribute"])
def test_names_of_what_has_changed(change, named):
    """What a report tells of an attempt that left something behind."""
    net = Net()
    before = copy_state(net)
    change(net)
    changed = changed_names(before, copy_state(net))
    for name in named:
        assert any(name in each for each in changed), changed
    assert bool(changed) is bool(named)
