"""How the leaves of a training are named."""

from __future__ import annotations

import pytest
import torch

from pytest_torchcompile.oracle.leaf_limits import Leaf, note, problem
from pytest_torchcompile.oracle.recording import Recording, Step, TrainingOutput, named_leaves
from pytest_torchcompile.oracle.training import rename_leaves

pytestmark = pytest.mark.needs_torch
STEP = Step("step 2", {"output['gradient of x']": 1}, torch.ones(()), {"up.weight": torch.ones(3), "down.weight": None})


def test_a_step_comes_first():
    """Its gradients are gradients, also one that never arrived; an output stays one, whatever its path."""
    leaves, structure = named_leaves(TrainingOutput([STEP]))
    assert [(leaf.name, leaf.kind) for leaf in leaves] == [
        ("step 2: output['gradient of x']", "value"), ("step 2: loss", "value"),
        ("step 2: gradient of up.weight", "gradient"), ("step 2: gradient of down.weight", "gradient"),
    ]
    entries = """"output['gradient of x']": *, 'loss': *, 'gradient of up.weight': *, 'gradient of down.weight': *"""
    assert structure == f"{{'step 2': {{{entries}}}}}"


def test_a_recording_has_the_kinds():
    """Of outputs that are no plain values."""
    leaves, _ = named_leaves(TrainingOutput([STEP]))
    recording = Recording(outputs=dict.fromkeys(leaf.name for leaf in leaves), kinds={leaves[2].name: "gradient"})
    assert [kind for _, kind, _ in recording.items()] == ["value", "value", "gradient", "value"]


@pytest.mark.parametrize(("name", "expected"), [
    ("step 1: gradient of a and step 1: gradient of b", ["step 1: gradient of a and step 1: gradient of b"]),
    ("up.weight after the call", ["up.weight after 3 steps"]),
    ("loss", []),
])
def test_what_is_left_behind(name, expected):
    """After all steps, not after a call; the loss of the training itself says nothing."""
    assert [leaf.name for leaf in rename_leaves([Leaf(name, "value")], 3)] == expected


def gradient_leaf(name, **values):
    return Leaf(name, "gradient", numel=4, rms=1.0, bias=1.0, peak=1.0, **values)


def after_steps(peak):
    return Leaf("up.weight after the call", "mutation", numel=4, rms=1.0, bias=1.0, peak=peak)


@pytest.mark.parametrize("name", [
    "step 2: gradient of up.weight", "step 3: gradient of up.weight, added to that of step 2",
])
def test_a_parameter_is_as_far_off_as_the_gradients_that_moved_it(name):
    """Of a gradient of nothing but noise one element may be 100 units away, and so may what it moved."""
    _, moved = rename_leaves([gradient_leaf(name, blind=4), after_steps(100.0)], 3)
    assert not moved.decided
    assert problem(moved) is None
    assert "the steps that moved it are no larger than their rounding noise" in note(moved)
    _, far = rename_leaves([gradient_leaf(name, blind=4), after_steps(200.0)], 3)
    assert problem(far) == "up.weight after 3 steps: one element is 200 times its rounding noise away (limit 128)"


def test_a_parameter_that_gradients_with_a_meaning_moved_keeps_its_limit():
    """The gradient of another parameter that ends alike, or an output that is called like one, says nothing of it."""
    others = [gradient_leaf("step 1: gradient of up.weight"), gradient_leaf("output: gradient of up.weight", blind=4),
              gradient_leaf("step 1: gradient of deep.up.weight", blind=4)]
    *_, moved = rename_leaves([*others, after_steps(29.3)], 3)
    assert problem(moved) == "up.weight after 3 steps: one element is 29.3 times its rounding noise away (limit 16)"
