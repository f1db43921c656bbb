"""Coverage: the share of a forward's operator calls that ran inside compiled graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile.gauges import coverage
from pytest_torchcompile.ledger import observe

# Torch's own: Inductor's first import, and Dynamo looking at `.grad` of an input that is no leaf.
pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
              pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]



class Block(nn.Module):
    """Five operators."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        """Forward."""
        return x + self.norm(self.linear(x)).relu()


class Model(nn.Module):
    """Two blocks and a head: 4 + 4 + 2 operators."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(4, 3)

    def forward(self, x):
        """Forward."""
        for block in self.blocks:
            x = block(x)
        return self.head(x).softmax(-1)


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


X = torch.ones(2, 4)


def covered(compiled):
    """Coverage of a compiled model against a fresh eager one."""
    eager = Model()
    return coverage.measure_coverage(lambda: eager(X), lambda: compiled(X))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_fully_compiled_model_has_coverage_one(backend, dynamic, grad):
    """All of it in graphs, cold and warm, with and without gradients; measuring recompiles nothing."""
    compiled = torch.compile(Model(), backend=backend, dynamic=dynamic)
    with torch.set_grad_enabled(grad), observe() as seen:
        cold, warm = covered(compiled), covered(compiled)
    assert (cold.total, cold.share, warm.share) == (10, 1.0, 1.0)
    assert len(seen.compiles) - len([c for c in seen.compiles if c.kind == "backward"]) == 1
    assert [*seen.recompiles, *seen.graph_breaks, *seen.eager_frames] == []


def test_regional_compile_leaves_the_rest_outside():
    """Blocks compiled, head eager: 2 of 10 operators outside, named."""
    model = Model()
    for block in model.blocks:
        block.compile(backend="eager")
    found = covered(model)
    assert (found.total, found.outside, found.share) == (10, 2, 0.8)
    assert set(found.sites) == {"aten::linear x1", "aten::softmax x1"}


def test_a_disabled_submodule_is_outside():
    """The disabled block and what follows it in the frame that cannot resume are not compiled."""
    model = Model()
    model.blocks[1].forward = torch.compiler.disable(model.blocks[1].forward)
    found = covered(torch.compile(model, backend="eager"))
    assert 0 < found.share < 1


def test_a_frame_that_gave_up_has_coverage_zero():
    """The recompile limit: the call runs eagerly."""
    compiled = torch.compile(Model(), backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled(torch.ones(3, 4))
        found = covered(compiled)
    assert (found.outside, found.share) == (10, 0.0)


def test_force_eager_has_coverage_zero():
    """A stance that runs all eagerly, on a model that is compiled."""
    compiled = torch.compile(Model(), backend="eager")
    compiled(X)
    with torch.compiler.set_stance("force_eager"):
        assert covered(compiled).share == 0.0
    assert covered(compiled).share == 1.0


def test_a_model_without_operators_has_coverage_zero():
    """Nothing was compiled, so nothing may look compiled."""
    assert coverage.measure_coverage(lambda: None, lambda: None).share == 0.0


def test_coverage_survives_json():
    """to_dict and from_dict."""
    found = coverage.Coverage(4, 1, 0.75, ("aten::mul x1",))
    assert coverage.Coverage.from_dict(found.to_dict()) == found
