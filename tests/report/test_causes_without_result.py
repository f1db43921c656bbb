"""A cell that has no result is one cause in one line: no check of it follows from another."""

from __future__ import annotations

import pytest
from runs import Run

from pytest_torchcompile.report.causes import group_causes
from pytest_torchcompile.report.facts import Facts


@pytest.mark.parametrize("kind", ["crash", "timeout", "no_rank", "internal"])
def test_all_checks_say_the_same(kind):
    run = Run()
    for name in run.ids:
        run.fails(name, kind, "gone before it began")
    (cause,) = group_causes(Facts(cell) for cell in run.blocks()[0]["cells"])
    assert cause.cells == run.ids
    assert set(cause.checks) == {"compiles", "graph_breaks", "recompiles"}
    assert list(cause.further_lines()) == []


@pytest.mark.parametrize("kind", ["crash", "timeout"])
def test_one_check_that_was_asked_for_is_not_its_cause(kind):
    """What ended the process would have ended any other check as well."""
    run = Run()
    run.checks = ["graph_breaks"]
    run.fails(run.ids[0], kind, "gone before it began")
    (cause,) = group_causes(Facts(cell) for cell in run.blocks()[0]["cells"])
    assert cause.name == f"{kind}, so no check has a result"
