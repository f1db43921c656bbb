"""An error of an eager run is the user's only where the user's code raised it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.layer.training_step import StepFailed, refuse_user_error
from pytest_torchcompile.observation import Job
from pytest_torchcompile.oracle import recorder
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.oracle.recording import Fault
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.run.runner import run_cell

pytestmark = pytest.mark.needs_torch
FORK = "Unable to handle autograd's threading in combination with fork-based multiprocessing."


class Raises(torch.nn.Module):
    """Its own code raises."""

    def forward(self, x):
        raise KeyError("weights")


class WrongShape(torch.nn.Module):
    """An operator of its own raises; the tape runs it."""

    def forward(self, x):
        return x @ torch.ones(5, 5)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        raise ValueError("no gradient of mine")


class RaisesInBackward(torch.nn.Module):
    def forward(self, x):
        return Backward.apply(x)


class Forked(torch.nn.Module):
    """What torch says in a fork that came too late: the user has forked nothing."""

    def forward(self, x):
        raise RuntimeError(FORK)


def refuse(*given, **named):
    raise ValueError("a loss that is refused")


SOURCE = """
def our_mistake(*given, **named):
    raise IndexError('of our own')
"""
made = {}
exec(compile(SOURCE, Path(recorder.__file__).with_name("mistaken.py"), "exec"), made)  # as if the file were one of ours
our_mistake = made["our_mistake"]


def error_of(module, **given):
    seen = record(module, module, Batch.of(torch.ones(2, 4, requires_grad=True)), mode=Tape(), **given)
    assert seen.error is not None
    return seen.error


@pytest.mark.parametrize(("module", "given"), [
    (Raises(), {}), (WrongShape(), {}), (torch.nn.Linear(3, 3), {}), (RaisesInBackward(), {}),
    (torch.nn.Identity(), {"loss": refuse}),
], ids=["its code", "an operator", "a layer of torch's", "its backward", "its loss"])
def test_what_the_users_code_raises_is_the_users(module, given):
    """Also where an operator of torch's raises, which is run by a mode of ours."""
    assert not error_of(module, **given).ours


@pytest.mark.parametrize("part", ["recorder.default_loss", "recorder._Run.keep_output", "tape.Tape._note_rounding",
                                  "tape.operator_facts", "held.leaves_of"])
def test_what_our_code_raises_is_ours(monkeypatch, part):
    """Before, after and in the middle of the user's call."""
    from pytest_torchcompile.oracle.held import Held

    monkeypatch.setattr(f"pytest_torchcompile.oracle.{part}", our_mistake)
    module = torch.nn.Linear(4, 4)
    batch = Batch.of(torch.ones(2, 4))
    seen = recorder.record(Held().keep_outputs(module), module, batch, mode=Tape())
    assert seen.error is not None
    assert seen.error.ours


def test_a_fork_that_came_too_late_is_ours():
    """Wherever torch notices it."""
    assert error_of(Forked()).ours


MODELS = """
import torch

def fine():
    return torch.nn.Linear(4, 4)

def raises():
    raise RuntimeError({fork!r})

def batch(B):
    return torch.randn(B, 4)
"""


def observed(tmp_path, factory="fine"):
    (tmp_path / "owned_models.py").write_text(MODELS.format(fork=FORK))
    path = tmp_path / "m.yaml"
    path.write_text(f"""
version: 1
models: {{net: {{factory: "owned_models:{factory}", inputs: "owned_models:batch", dims: {{B: 3}}}}}}
axes: {{backend: [eager], phase: [training]}}
""")
    matrix = load_matrix(path)
    (planned,) = matrix.cells
    job = Job(planned.cell.to_dict(), matrix.models["net"].to_dict(), str(tmp_path), ("compiles", "training_steps"))
    seen, _ = run_cell(job)
    return seen["failure"]


@pytest.mark.parametrize("part", ["oracle.recorder._Run.keep_output", "oracle.training.detached_copy"])
def test_a_cell_says_that_we_are_wrong(monkeypatch, tmp_path, part):
    """In a call and in training steps; the evidence is the whole stack."""
    monkeypatch.setattr(f"pytest_torchcompile.{part}", our_mistake)
    failure = observed(tmp_path)
    assert failure["kind"] == "internal"
    assert failure["message"] == "pytest-torchcompile itself failed, not the model: IndexError: of our own"
    assert "in our_mistake" in failure["evidence"]


def test_a_factory_in_a_fork_that_came_too_late(tmp_path):
    """The factory raised it, and it is ours still."""
    failure = observed(tmp_path, "raises")
    assert failure["kind"] == "internal"
    assert failure["message"] == f"pytest-torchcompile itself failed, not the model: RuntimeError: {FORK}"


@pytest.mark.parametrize(("ours", "text"), [
    (True, "the test itself failed, which is no fault of the model: KeyError in forward: 'weights'"),
    (False, "the model raises without torch.compile too: KeyError in forward: 'weights'"),
])
def test_the_smoketest_blames_no_model_for_us(ours, text):
    """Only what is the user's has an error that is raised to him."""
    error = KeyError("weights")
    with pytest.raises(StepFailed) as found:
        refuse_user_error(Fault.of(error, "forward", ours=ours), 1, Batch.of(torch.ones(1)))
    assert str(found.value) == text
    assert found.value.user_error is (None if ours else error)
