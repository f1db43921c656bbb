"""What checks said of models that are as they should be, each shown on a cell of a few lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.checks import load
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.models import ModelEntry
from pytest_torchcompile.observation import Job, Observation
from pytest_torchcompile.runner import run_cell
from pytest_torchcompile.verdicts import judge

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def observed(model, inputs, *checks, dims=None, **axes):
    """The observation of a cell of a model and inputs of this file."""
    entry = ModelEntry("model", f"{__name__}:{model.__name__}", f"{__name__}:{inputs.__name__}", dims=dims or {})
    cell = Cell(model="model", **{"backend": "aot_eager", **axes})
    seen, _ = run_cell(Job(cell.to_dict(), entry.to_dict(), str(Path.cwd()), checks))
    assert seen["failure"] is None, seen["failure"]
    return Observation.from_dict(seen)


class Cached(nn.Module):
    """Is given the length of its cache as a number, as decoders are."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 6)

    def forward(self, x, past):
        return self.net(x) * (past + 1)


def with_past(past):
    return torch.randn(3, 6), past


@pytest.mark.parametrize(("dynamic", "recompiles"), [("auto", 1), ("static", 2)])
def test_a_number_that_is_a_dim_is_a_size(dynamic, recompiles):
    """past_length is 4, 6 and 9: as many recompiles as three sizes explain, and no more."""
    seen = observed(Cached, with_past, "recompiles", dims={"past": Dim(choices=(4, 6, 9))}, dynamic=dynamic)
    section = seen.sections["recompiles"]
    assert [found["cause"] for found in section["recompiles"]] == ["value"] * recompiles
    assert judge(seen, ["recompiles"], {})["recompiles"].verdict == "pass"


def test_a_number_that_is_no_dim_stays_a_value():
    """Another pair of numbers, and more recompiles than the sizes explain, fail as before."""
    found = {"kind": "recompile", "function": "f", "file": "m.py", "line": 3, "cause": "value",
             "reason": "past == 4", "what": "past", "expected": "4", "actual": "6", "during": "call 2",
             "compile_id": "0/1"}
    section = {"raised": None, "graphs": 1, "recompiles": [found], "sizes": 3, "dynamic": "auto",
               "bound": {"past": [4, 6, 9]}}
    check = load("recompiles").judge
    assert list(check(section, {})) == []
    (other,) = check(section | {"bound": {"past": [4, 9]}}, {})
    assert other.message == "1 recompile(s) that no size explains"
    (often,) = check(section | {"recompiles": [found, found]}, {})
    assert often.message == "2 recompile(s), 1 explained by 3 size(s) with dynamic=auto"
    assert often.hint.startswith("past is the dim past itself")
