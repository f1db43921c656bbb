"""Whole steps: forward, loss and backward in one graph, each pass of it judged, and every refusal one sentence."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from pytest_torchcompile import judge_passes
from pytest_torchcompile.backends.toolkit import Toolkit
from pytest_torchcompile.errors import InstrumentError, UsageError
from pytest_torchcompile.ledger import observe
from pytest_torchcompile.oracle.whole_step import WholeStep, compile_step

pytestmark = pytest.mark.needs_torch
aten = torch.ops.aten


class Net(nn.Module):
    """Dropout, a buffer that is written to, and a layer that nobody uses."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.idle = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        hidden = self.norm(self.up(x)).tanh()
        return self.down(nn.functional.dropout(hidden, 0.1, self.training))


def squares(output, batch):
    return (output - batch[:, :4]).square().mean()


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def larger_gradient(module):
    """The last product is one of the backward pass."""
    node = [each for each in module.graph.nodes if each.target is aten.mm.default][-1]
    with module.graph.inserting_after(node):
        scaled = module.graph.call_function(aten.mul.Tensor, (node, 1.01))
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("loss", [None, squares], ids=["no loss", "a loss"])
def test_one_graph_has_the_whole_step(loss, compiler):
    """Loss and gradients are those of eager, from one graph without a backward graph."""
    torch.manual_seed(0)
    step, x = WholeStep(Net().eval(), loss), torch.randn(5, 6)
    backend = Toolkit(capture="step", compiler=compiler, decompositions="inductor")
    with torch.no_grad(), observe() as seen:
        found = compile_step(step, {"backend": backend, "fullgraph": True, "dynamic": False})(x).values
    expected = Net().eval()
    expected.load_state_dict(step.model.state_dict())
    output = expected(x)
    torch.testing.assert_close(found["output"], output)
    if loss is not None:
        squares(output, x).backward()
        torch.testing.assert_close(found["gradient of up.weight"], expected.up.weight.grad)
    assert "gradient of idle.weight" not in found
    assert [note.graph for note in backend.notes] == ["joint", "forward"]
    assert (len(seen.graphs), len(seen.graph_breaks)) == (1, 0)


def test_passes_over_a_whole_step():
    """Right ones are silent; a wrong one is named with the gradient that it changed."""
    torch.manual_seed(0)
    calls = [torch.randn(8, 6), torch.randn(5, 6)]
    passes = ["dead_code", "common_subexpressions", "constant_folding"]
    assert judge_passes(Net(), calls, passes, capture="step", loss=squares).ok
    (problem,) = judge_passes(Net(), calls, ["dead_code", larger_gradient], capture="step", loss=squares).problems
    assert re.match(r"pass 2 of 2 \(larger_gradient\) changed gradient of \S+ \([\d.e+]+ times the rounding", problem)


def test_what_has_no_whole_step(monkeypatch):
    """A function, a model without parameters, a graph whose results want a gradient, a torch that can't."""
    x = torch.randn(3, 6)
    with pytest.raises(UsageError, match="capture 'step' is a training step of a module"):
        judge_passes(torch.tanh, [x], ["dead_code"], capture="step")
    with pytest.raises(UsageError, match="of this model there is no loss, or no parameter wants a gradient"):
        WholeStep(nn.Tanh())(x)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="takes a step that does its own backward pass"):
        torch.compile(Net(), backend=Toolkit(capture="step"), fullgraph=True)(x)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(InstrumentError, match=r"^torch 2\.11\.0\+cu130 cannot .*`capture: step` needs torch 2\.13"):
        compile_step(WholeStep(Net()), {})
    monkeypatch.undo()
    monkeypatch.setattr(torch._dynamo, "config", object())
    with pytest.raises(InstrumentError, match=r"cannot trace through torch\.autograd\.grad .*`capture: joint` has"):
        compile_step(WholeStep(Net()), {})


def test_the_optimiser_breaks_a_graph_on_purpose():
    """Why it has no part in a whole step; where this ends to be so, it could have one."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"optimizer\.py.*\n.*torch\._dynamo\.graph_break\(\)"):
        torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)()
