"""What correct compilers were accused of on real models, each as a program of a few lines that shows the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile import CompileConfig, compare
from pytest_torchcompile.oracle.limits import note, problem
from pytest_torchcompile.oracle.properties import attributes, properties
from pytest_torchcompile.oracle.recording import Item, Recording

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class UnusedPooler(nn.Module):
    """What becomes of BERT's pooler when the loss leaves it out: AOTAutograd gives its weight zeros."""

    def __init__(self):
        super().__init__()
        self.body, self.pooler = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        hidden = self.body(x)
        return {"hidden": hidden, "pooled": torch.tanh(self.pooler(hidden))}


def loss_of_hidden(output, batch):
    return output["hidden"].square().mean()


def test_zeros_in_place_of_none_are_a_note():
    """The kind says what it is, the note what it changes; a training says it in one line too."""
    found = compare(UnusedPooler(), [torch.randn(4, 6)], CompileConfig(enabled=True, backend="aot_eager"),
                    loss=loss_of_hidden, steps=2)
    assert found.ok, str(found)
    kinds = {(leaf.name, leaf.kind) for _, leaf in found.leaves if leaf.kind == "zero_gradient"}
    assert ("gradient of pooler.weight", "zero_gradient") in kinds
    assert ("step 1: gradient of pooler.weight", "zero_gradient") in kinds
    told = next(text for text in found.notes if text.startswith("gradient of pooler.weight"))
    assert "eager has none, compiled has zeros" in told
    assert "weight decay and momentum" in told


def test_other_gradients_in_place_of_none_stay_wrong():
    """Zeros are the one exception: what is no zero, and what is lost, is a problem."""
    something, nothing = Item(torch.tensor([0.0, 1e-30])), Item(None)
    (extra,) = attributes("gradient of w", "gradient", nothing, something)
    assert problem(extra) == "gradient of w: eager has none, compiled a gradient"
    (nan,) = attributes("gradient of w", "gradient", nothing, Item(torch.full((2,), float("nan"))))
    assert problem(nan) == "gradient of w: eager has none, compiled a gradient"
    (lost,) = attributes("gradient of w", "gradient", Item(torch.zeros(2)), nothing)
    assert problem(lost) == "gradient of w: eager has a gradient, compiled none"
    (zeros,) = attributes("gradient of w", "gradient", nothing, Item(torch.zeros(2)))
    assert problem(zeros) is None
    assert note(zeros).startswith("gradient of w: eager has none, compiled has zeros: optimisers skip the one")


def test_a_long_structure_is_told_by_its_first_difference():
    """Two dicts of hundreds of entries are one line."""
    eager = ", ".join(f"'gradient of layer.{i}.weight': *" for i in range(100))
    other = eager.replace("layer.50", "layer.fifty")
    (told, *_) = properties(Recording(structure=eager), Recording(structure=other))
    text = problem(told)
    assert len(text) < 500
    assert "layer.50.weight" in text
    assert "layer.fifty.weight" in text
    (short, *_) = properties(Recording(structure="(*, *)"), Recording(structure="[*, *]"))
    assert problem(short) == "output structure: eager returned (*, *), compiled [*, *]"


