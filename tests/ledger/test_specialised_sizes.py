"""A size that the code makes a constant of: nobody is advised to mark it as dynamic."""

from __future__ import annotations

import pytest
import torch

from pytest_torchcompile import observe
from pytest_torchcompile.ledger.explain import recompile_advice
from pytest_torchcompile.ledger.records import Compile
from pytest_torchcompile.ledger.specialised_sizes import specialised_sizes

pytestmark = pytest.mark.needs_torch


def rows_one_by_one(x):
    """Unrolled, so each number of rows is a graph of its own."""
    total = 0
    for row in range(x.shape[0]):
        total = total + x[row].sum()
    return total


def looked_up(x):
    """A dictionary has a value for one size."""
    return x * {4: 2.0}.get(x.shape[0], 1.0)


def all_rows(x):
    """As it should be."""
    return x.sum() * 2


def compiles_of(function, dynamic=None):
    """Of calls with three sizes."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", dynamic=dynamic)
    with observe() as seen:
        for rows in (3, 5, 7):
            compiled(torch.ones(rows, 2))
    return seen.compiles


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", [rows_one_by_one, looked_up])
def test_a_size_that_the_code_fixes(function, dynamic):
    """Each recompile names the line, and marking it is not advised: torch would refuse that."""
    recompiles = [compiled for compiled in compiles_of(function, dynamic) if compiled.kind == "recompile"]
    assert len(recompiles) == 2
    for recompile in recompiles:
        place = recompile.specialised["x.size(0)"]
        assert place.startswith(f"{__file__}:")
        advice = recompile_advice(recompile)
        assert advice.startswith("the code makes a constant of this size at ")
        assert advice.endswith(": write it with tensor operations, or pad to a few buckets (ShapeStabilizer, "
                               "shape_buckets)")
        assert "mark_dynamic would raise" in advice


def test_marking_it_does_raise():
    """What the advice says of mark_dynamic is true."""
    x = torch.ones(3, 2)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(Exception, match=r"marked batch as dynamic|Constraints violated|specialized"):
        torch.compile(looked_up, backend="eager")(x)


def test_a_size_that_may_change():
    """The clean twin: nothing is fixed, and marking helps."""
    compiles = compiles_of(all_rows)
    assert [compiled.kind for compiled in compiles] == ["first", "recompile"]
    assert not any(compiled.specialised for compiled in compiles)
    assert "or torch._dynamo.mark_dynamic(x, 0, min=2, max=your largest)" in recompile_advice(compiles[1])


def test_another_size_of_the_tensor():
    """That dim 0 is fixed says nothing of dim 1."""
    found = Compile("f", "net.py", 3, "0/1", "recompile", "tensor 'x' size mismatch at index 1. expected 3, actual 4",
                    "shape", what="x.size(1)", expected="3", actual="4", specialised={"x.size(0)": "net.py:4"})
    assert "mark_dynamic(x, 1" in recompile_advice(found)


def test_an_event_without_a_place():
    """Then the advice names none."""
    event = {"sources": ["L['batch']['x'].size()[0]"], "user_stack": [{"filename": -1, "line": 3}]}
    assert specialised_sizes(event) == {"batch['x'].size(0)": ""}
    found = Compile("f", "net.py", 3, "0/1", "recompile", "reason", "shape", what="x.size(0)", expected="3", actual="4",
                    specialised={"x.size(0)": ""})
    assert recompile_advice(found).startswith("most likely an operator, its backward pass or the backend "
                                               "(torch names no line of yours) makes a constant of this size")
