"""What a call leaves in Python: compared where it was the same before, and silent where histories differ."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import compare, note, problem, record, reference

pytestmark = pytest.mark.needs_torch
BATCH = Batch.of(torch.ones(2, 3))


class Keeps(nn.Module):
    """A layer that keeps all sorts of things."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.inner.calls, self.sizes, self.last, self.mean = 0, [], {"shape": None}, 0.0
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        """Note the call."""
        self.inner.calls += 1
        self.sizes.append(len(x))
        self.last["shape"] = tuple(x.shape)
        self.mean = float(x.mean())
        random.random()
        numpy.random.rand()
        torch.rand(1, generator=self.generator)
        return self.inner(x)


class Asks(Keeps):
    """Never: but is_compiling stands in this file."""


def differences(spoil, before=lambda model: None, make=Keeps):
    """Leaves that differ where a compiled call does something else at its end."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    eager_model, model = models
    before(model)

    def call(x):
        output = model(x)
        spoil(model)
        return output

    eager, compiled = record(eager_model, eager_model, BATCH), record(call, model, BATCH)
    return [leaf for leaf in compare(eager, compiled, lambda: reference(Keeps(), BATCH)) if problem(leaf) or note(leaf)]


def uncount(model):
    """Lose a count."""
    model.inner.calls -= 1


FAULTS = {
    "counter": (uncount, "attribute inner.calls"),
    "list": (lambda model: model.sizes.pop(), "attribute sizes"),
    "dict": (lambda model: model.last.update(shape=(2, 4)), "attribute last"),
    "Python": (lambda model: random.random(), "random generator: Python"),
    "NumPy": (lambda model: numpy.random.rand(), "random generator: NumPy"),
    "own": (lambda model: torch.rand(1, generator=model.generator), "random generator: attribute generator"),
}


@pytest.fixture(autouse=True)
def _asks_nothing(monkeypatch):
    """This file has the word in it."""
    monkeypatch.setattr("pytest_torchcompile.oracle.python_state._asked", {Keeps: False, Asks: True})


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_call_leaves_in_python(fault):
    """Each is called by its name; a copy can't be made of this model, and that is no matter."""
    spoil, name = FAULTS[fault]
    assert [leaf.name for leaf in differences(spoil) if problem(leaf)] == [name]


def test_the_same_is_silent():
    """So are numbers in floating point, which may have been rounded otherwise, and other histories."""
    assert differences(lambda model: None) == []
    assert differences(lambda model: setattr(model, "mean", 0.3)) == []
    assert differences(lambda model: setattr(model, "where", id(model)), lambda model: setattr(model, "where", 0)) == []
    assert differences(lambda model: None, before=lambda model: setattr(model.inner, "calls", 7)) == []


def test_what_torchs_modules_note_of_themselves_is_not_compared():
    """DDP rebuilds its buckets in the first call of all, eager or compiled."""
    assert differences(lambda model: setattr(model.inner, "_has_rebuilt", True)) == []
    assert differences(lambda model: setattr(model, "_mine", True)) != []


def test_a_module_that_asks_may_differ():
    """It is told, and fails nothing."""
    (leaf,) = differences(lambda model: model.sizes.pop(), make=Asks)
    assert problem(leaf) is None
    assert note(leaf) == ("attribute sizes: is [2] after the eager call, [] after the compiled one; its module asks "
                          "whether it is compiled, so this may be on purpose")
