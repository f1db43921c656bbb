"""How the leaves of a training are named."""

from __future__ import annotations

import pytest
import torch

from pytest_torchcompile.oracle.leaf_limits import Leaf
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
