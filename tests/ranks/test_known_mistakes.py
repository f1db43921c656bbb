"""Which mistakes of one cell are those of every other one that calls the user's functions alike."""

from __future__ import annotations

import pytest

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.observation import RAISED_TWICE, Failure, Job, Observation
from pytest_torchcompile.ranks.known_mistakes import KnownMistakes

TEXT = "m.yaml:3:5: inputs 'models:batch' raised IndexError: none"


def told_to_another(failure, seconds=(), **axes):
    """What another cell is told after one has failed; its axes may be others."""
    job = Job({}, {"where": "m.yaml:3:5", "inputs": "models:batch"}, "/", ("compiles",))
    mistakes = KnownMistakes()
    first = Cell(model="net", backend="eager")
    mistakes.note(first, job, Observation(first.id, failure=failure, seconds=dict(seconds)))
    return mistakes.observation_of(Cell(model="net", backend="inductor", **axes), job)


def test_a_function_that_raised_twice():
    """The other cell has the failure, and it says which cell found it."""
    told = told_to_another(Failure("usage", TEXT, RAISED_TWICE))
    assert told.failure.message == TEXT
    assert "its factory and inputs are called as those of net-eager" in told.failure.evidence


@pytest.mark.parametrize(("failure", "seconds", "axes"), [
    (None, (), {}),
    (Failure("user", TEXT, RAISED_TWICE), (), {}),
    (Failure("usage", TEXT), (), {}),
    (Failure("usage", TEXT.replace("IndexError", "OutOfMemoryError"), RAISED_TWICE), (), {}),
    (Failure("usage", TEXT, RAISED_TWICE), [("eager", 1.0)], {}),
    (Failure("usage", TEXT, RAISED_TWICE), (), {"dtype": "bfloat16"}),
    (Failure("usage", TEXT, RAISED_TWICE), (), {"user": (("hidden", 4),)}),
], ids=["none", "the model", "once", "memory", "after the model ran", "another dtype", "another argument"])
def test_what_another_cell_finds_out_itself(failure, seconds, axes):
    """It is run."""
    assert told_to_another(failure, seconds, **axes) is None
