"""Cells of `capture: step`: judged as any other, with the gradients that the step returns; and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.checks import load
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.run.runner import run_cell

pytestmark = pytest.mark.needs_torch
CHECKS = ("compiles", "equivalence", "gradients", "graph_breaks", "passes")
HERE = "m.yaml:3:5"
aten = torch.ops.aten


def larger_gradient(module):
    """The last product is one of the backward pass."""
    node = [each for each in module.graph.nodes if each.target is aten.mm.default][-1]
    with module.graph.inserting_after(node):
        scaled = module.graph.call_function(aten.mul.Tensor, (node, 1.01))
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)


def observed(checks=CHECKS, **axes):
    """What a run of the cell saw."""
    entry = ModelEntry("net", "pytest_torchcompile.zoo:tiny_head", "pytest_torchcompile.zoo:vector_batch",
                       dims={"B": Dim(size=3)}, where=HERE)
    cell = Cell(model="net", **{"backend": "toolkit", "capture": "step", "compiler": "eager", "dynamic": "static",
                                "passes": "common_subexpressions", **axes})
    return run_cell(Job(cell.to_dict(), entry.to_dict(), str(Path(__file__).parent), checks))[0]


def problems(seen):
    """What each check says."""
    assert seen["failure"] is None, seen["failure"]
    return {name: [problem.message for problem in load(name).judge(seen["sections"][name], {})] for name in CHECKS}


def test_a_right_pass_and_a_wrong_one():
    """The wrong one is told by gradients and passes; the output and the loss are right."""
    found = problems(observed())
    assert not any(found.values())
    found = problems(observed(passes="test_whole_step_cell:larger_gradient"))
    assert found["equivalence"] == []
    assert found["gradients"][0].startswith("gradient of linear.weight: error is ")
    assert found["passes"][0].startswith(
        "pass 1 of 1 (test_whole_step_cell:larger_gradient) changed gradient of linear.weight (")


@pytest.mark.parametrize("captures", [("joint", "step"), ("step", "joint")])
def test_a_step_and_its_model_have_references_of_their_own(captures):
    """In one process, which keeps float64 runs for later cells: a step was held against its model's, which has no such
    loss, and "eager does not repeat itself" was said of the last bit. A fault is still seen, and of the gradient alone.
    """
    for capture in captures:
        seen = observed(capture=capture, compiler="inductor", decompositions="inductor")
        assert not any(problems(seen).values())
        for name in ("equivalence", "gradients"):
            assert "eager-only" not in [leaf.get("against") for leaf in seen["sections"][name]["leaves"]]
    found = problems(observed(capture=captures[1], passes="test_whole_step_cell:larger_gradient"))
    assert found["equivalence"] == []
    assert found["gradients"][0].startswith("gradient of linear.weight: error is ")


@pytest.mark.parametrize(("given", "text"), [
    ({"wrapper": "checkpoint"}, "and this cell has wrapper 'checkpoint' and phase 'training'; write `wrapper: none`"),
    ({"phase": "inference"}, "and this cell has wrapper 'none' and phase 'inference'; write `wrapper: none`"),
    ({"checks": ("compiles", "smoketest")}, "and check 'smoketest' runs the model by itself; leave it out"),
])
def test_what_has_no_whole_step(given, text):
    """One sentence, with the place in the matrix."""
    failure = observed(**given)["failure"]
    assert failure["kind"] == "usage"
    assert failure["message"].startswith(f"{HERE}: capture 'step' is forward, loss and backward of a model in one ")
    assert text in failure["message"]


def test_a_torch_that_cannot_is_a_skip(monkeypatch):
    """With what is missing."""
    monkeypatch.setattr("pytest_torchcompile.run.subject.why_no_step", lambda: "this torch cannot")
    failure = observed()["failure"]
    assert (failure["kind"], failure["message"]) == ("skip", "this torch cannot")


def test_a_pass_for_another_device_is_a_skip():
    """CUDA graphs on a CPU."""
    failure = observed(capture="default", passes="dead_code, cuda_graphs", compiler="none")["failure"]
    assert (failure["kind"], failure["message"]) == (
        "skip", "pass cuda_graphs is for device cuda, and this cell runs on cpu")
