"""Cells that are run each time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.expansion import PlannedCell
from pytest_torchcompile.reuse.cell_key import is_settled
from pytest_torchcompile.reuse.cell_reuse import why_always_run

PLANNED = PlannedCell(Cell(model="net"))
JOB = Job({}, {}, "", ("compiles", "equivalence"))


@pytest.mark.parametrize(("planned", "job", "text"), [
    (PLANNED, JOB, ""),
    (replace(PLANNED, outcome="xfail"), JOB, "a cell with a rule `xfail` always runs"),
    (PLANNED, replace(JOB, checks=("compiles", "worth")), "a cell that is timed (check worth) always runs"),
], ids=["plain", "xfail", "timed"])
def test_which_cells_always_run(planned, job, text):
    """Each with the reason."""
    assert why_always_run(planned, job) == text
    assert "worth" in CHECKS


def test_a_wavering_model_is_always_run():
    """A comparison of it says that two runs differ."""
    leaf = {"kind": "value"}
    assert is_settled({"sections": {"numerics": {"leaves": [leaf]}}})
    assert not is_settled({"sections": {"numerics": {"leaves": [leaf, {"kind": "nondeterministic"}]}}})
