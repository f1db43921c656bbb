"""What checks said of models that are as they should be, each shown on a cell of a few lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.checks import load
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.gauges import autotune
from pytest_torchcompile.gauges.autotune import autotunes_kernels, pads_by_timing
from pytest_torchcompile.observation import Job, Observation
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.run.runner import run_cell
from pytest_torchcompile.run.verdicts import judge_observation

pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")]


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
    assert judge_observation(seen, ["recompiles"], {})["recompiles"].verdict == "pass"


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


class Padded(nn.Module):
    """Returns a result of matrix products."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 5)

    def forward(self, x):
        return self.net(x)


def rows():
    return torch.randn(4, 6)


def padding(graph, example):
    """A backend that lays its outputs out in rows of eight, as Inductor does where it finds that faster."""

    def run(*inputs):
        return [torch.empty_strided(y.shape, (8, 1)).copy_(y) if y.ndim == 2 else y for y in graph(*inputs)]

    return run


def stored(timed, name="output"):
    return {"raised": None, "compared": 3, "strides": [
        {"name": name, "eager": "(5, 1)", "compiled": "(8, 1)", "timed": timed, "calls": ["call 1", "call 1, again"]}]}


def test_strides_are_the_check_layout_and_no_other():
    """Numbers that are equal pass `equivalence`, however they lie in memory."""
    seen = observed(Padded, rows, "equivalence", "layout", backend=f"{__name__}:padding", phase="inference")
    found = judge_observation(seen, ["equivalence", "layout"], {})
    assert found["equivalence"].verdict == "pass"
    (problem,) = found["layout"].problems
    assert problem.message == "output: stride is (5, 1) in eager, (8, 1) compiled"
    assert "and in 2 more call(s)" in problem.evidence
    assert judge_observation(seen, ["layout"], {"strides": 1})["layout"].verdict == "pass"


def test_what_a_stopwatch_may_have_decided_is_told_and_fails_nothing():
    """Nor do the strides of gradients; the limit counts them all."""
    check = load("layout")
    assert [p.message for p in check.judge(stored(""), {})] == ["output: stride is (5, 1) in eager, (8, 1) compiled"]
    for section in (stored("autotuning"), stored("", "gradient of net.weight")):
        assert list(check.judge(section, {})) == []
        assert check.remark(section).startswith("1 stride(s) differ, which are not promised or allowed")
        assert list(check.judge(section, {"strides": 1})) == []
    assert check.remark(stored("autotuning")).endswith("; autotuning may have decided by timing")
    (counted,) = check.judge(stored("autotuning"), {"strides": 0})
    assert counted.message.endswith("(8, 1) compiled; autotuning may have decided by timing")


@pytest.mark.parametrize(("settings", "devices", "tuned", "padded"), [
    ({"backend": "inductor"}, {"cpu"}, False, False),
    ({"backend": "inductor"}, {"cuda", "cpu"}, False, True),
    ({"backend": "inductor", "options": {"shape_padding": False}}, {"cuda"}, False, False),
    ({"backend": "inductor", "options": {"force_shape_pad": True}}, {"cuda"}, False, False),
    ({"backend": "inductor", "mode": "max-autotune"}, {"cpu"}, True, False),
    ({"backend": "aot_eager"}, {"cuda"}, False, False),
])
def test_where_inductor_uses_a_stopwatch(settings, devices, tuned, padded):
    """On a GPU it times whether to pad; autotuning times everywhere."""
    assert (autotunes_kernels(settings), pads_by_timing(settings, devices)) == (tuned, padded)


def test_another_order_of_axes_is_no_padding():
    """channels_last that was lost comes of no stopwatch."""
    assert autotune._is_padding("(5, 1)", "(8, 1)")
    assert not autotune._is_padding("(1, 5)", "(5, 1)")
    assert not autotune._is_padding("(8, 1)", "(5, 1)")
    assert not autotune._is_padding("(5, 1)", "None")
