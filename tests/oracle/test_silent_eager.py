"""What Dynamo skips without a word is compiled for nobody: the matrix and the layer's smoketest agree on it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile import CompileSmoketest
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.checks import load
from pytest_torchcompile.ledger.records import SILENT
from pytest_torchcompile.oracle.calls import Call, Side, TrialOptions
from pytest_torchcompile.oracle.trial import Trial

pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")]  # Dynamo asks for it, torch 2.13


class Mine(nn.Module):
    def forward(self, x):
        return torch.tanh(x) + x


class Around(nn.Module):
    """A block of the user's own around other parts."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def sequential():
    """Compiled in place, a container of torch's own runs eagerly, and so does what of it is torch's own."""
    return nn.Sequential(nn.Linear(4, 4), Mine())


def own():
    """The same computation in classes of the user's."""
    return Around(nn.Linear(4, 4), Mine())


SIDES = [(sequential, ["skipped"]), (own, [])]


def in_place(make):
    torch.manual_seed(0)
    module = make()
    module.compile(backend="eager")
    return module


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("make", "kinds"), SIDES)
def test_in_a_cell_of_a_matrix(make, kinds):
    """The check `compiles` names the frame."""
    def side(settings):
        module = in_place(make) if settings else make()
        return Side(module, module)

    trial = Trial(side, make(), {"backend": "eager"}, [Call(0, Batch.of(torch.randn(3, 4)))],
                  TrialOptions(train=False, covered=True))
    trial.run()
    section = load("compiles").measure(trial)
    assert sorted({f["kind"] for f in section["eager_frames"]} & SILENT) == kinds
    assert any(graph["runs"] for graph in section["graphs"])
    told = [problem.message for problem in load("compiles").judge(section, {"coverage": 0.0})]
    assert [text.partition(" in ")[0].partition(") ")[2] for text in told] == [
        f"silently ran eagerly: {kind}" for kind in kinds]


@pytest.mark.parametrize(("make", "kinds"), SIDES)
def test_in_a_smoketest(make, kinds):
    """So does the smoketest, whose True would have been a lie about half of the model."""
    module = in_place(make)
    test = CompileSmoketest(1)
    assert test.run(module, torch.randn(3, 4)) is not bool(kinds)
    result = test.last_result
    assert result.graphs
    if kinds:
        assert result.reason == f"a part silently ran eagerly: {', '.join(kinds)}"
        assert "Sequential.forward" in result.evidence
