"""The toolkit: backends made of passes, each seen to change what it is there to change and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile.backends.toolkit import Toolkit, both, calls, drop, edit, replace, results, toolkit
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.ledger import observe

pytestmark = pytest.mark.needs_torch


class Net(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.b(torch.relu(self.a(x)))


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def outcome(backend=None):
    """Output, gradients and buffer of one call, eagerly or compiled."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 4, requires_grad=True)
    y = (net if backend is None else torch.compile(net, backend=backend))(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in net.parameters()), net.calls]


def same(one, other):
    """Which of the values are equal."""
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("backend", [toolkit, Toolkit(recompute=True)])
def test_without_a_pass_it_computes_what_eager_computes(backend):
    """Bit by bit, and in a graph that runs."""
    expected = outcome()
    with observe() as seen:
        found = outcome(backend)
    assert all(same(found, expected))
    assert [graph.runs for graph in seen.graphs] == [1]
    assert not seen.eager_frames


def test_a_forward_pass_leaves_the_backward_right():
    """The output changes, the derivative of relu is still that of relu."""
    wrong = outcome(Toolkit(forward=results(lambda found, _: [found[0], found[1] + 1, *found[2:]])))
    assert torch.equal(wrong[0], outcome()[0] + 1)
    assert torch.equal(wrong[-1], torch.ones(()))


def test_a_backward_pass_leaves_the_output_right():
    """Every gradient is negated, and nothing else."""
    negated = results(lambda found, _: [g if g is None else -g for g in found])
    expected, wrong = outcome(), outcome(Toolkit(backward=negated))
    assert same(wrong, expected) == [True, *[False] * 5, True]
    assert all(torch.equal(w, -e) for w, e in zip(wrong[1:-1], expected[1:-1], strict=True))


def test_the_backward_follows_a_pass_over_dynamos_graph():
    """tanh in place of relu, differentiated as tanh."""

    class Tanh(Net):
        def forward(self, x):
            self.calls.add_(1)
            return self.b(torch.tanh(self.a(x)))

    torch.manual_seed(0)
    net, x = Tanh(), torch.randn(3, 4, requires_grad=True)
    y = net(x)
    y.square().sum().backward()
    wrong = outcome(Toolkit(dynamo=replace("relu", torch.tanh)))
    assert torch.equal(wrong[0], y)
    assert torch.equal(wrong[1], x.grad)


def test_one_call_of_several_and_several_passes():
    """The second of two linear layers loses its bias, and relu is dropped."""
    no_bias = replace("linear", lambda x, w, b: torch.nn.functional.linear(x, w), nth=1)
    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 4)
    wrong = outcome(Toolkit(dynamo=both(no_bias, drop("relu"))))
    assert torch.equal(wrong[0], net.a(x) @ net.b.weight.t())


def test_writes_in_place_are_seen_by_dynamos_graph_only():
    """The counter of calls is written in place there; AOTAutograd's graph returns its new value."""
    seen = {}

    def look(name):
        return lambda module: seen.update({name: {n.target for n in module.graph.nodes if n.op == "call_method"}})

    outcome(Toolkit(dynamo=look("dynamo"), forward=look("forward")))
    assert "add_" in seen["dynamo"]
    assert not seen["forward"]


def test_decompositions():
    """The passes see what an operator was taken apart into."""
    aten = torch.ops.aten
    names = set()

    def look(module):
        names.update(str(node.target) for node in module.graph.nodes)

    outcome(Toolkit(forward=look, decompositions={aten.relu.default: lambda x: x.clamp(min=0)}))
    assert "aten.relu.default" not in names
    assert any("clamp" in name for name in names)


@pytest.mark.parametrize(("backend", "text"), [
    (Toolkit(forward=replace("rely", torch.tanh)), "the graph has no call of 'rely'; did you mean 'relu'?"),
    (Toolkit(dynamo=drop("linear", nth=2)), "the graph calls 'linear' 2 times; there is no call number 2"),
    (Toolkit(dynamo=results(lambda found, _: found)), "that pass can only change it in place"),
    (Toolkit(forward=both(results(lambda found, _: found), drop("relu"))), "only the last of several passes"),
])
def test_mistakes_are_told_by_the_compile_error(backend, text):
    """What the pass looked for, and what is there."""
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=text.replace("?", r"\?")):
        outcome(backend)


def test_calls_are_found_by_their_plain_names():
    """Functions and methods alike; a mistake is a UsageError."""
    found = []
    outcome(Toolkit(dynamo=lambda module: found.extend([len(calls(module, "linear")), len(calls(module, "add_"))])))
    assert found == [2, 1]
    graph = torch.fx.symbolic_trace(lambda x: x.relu())
    with pytest.raises(UsageError, match="no call of 'mm'"):
        edit("mm", print)(graph)


def test_torch_finds_it_by_its_name():
    """As ``torch.compile(backend="toolkit")``, by the entry point of the installed package."""
    assert torch._dynamo.backends.registry.lookup_backend("toolkit") is toolkit
