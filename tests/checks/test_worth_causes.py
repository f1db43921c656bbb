"""Why it is not faster: each cause is named from its evidence, the largest first, and a healthy model has none."""

from __future__ import annotations

import pytest

from pytest_torchcompile.checks.worth import slow_cause

PARTS = {"library": 0.2, "generated": 0.6, "operators": 0.1, "guards": 0.02, "python": 0.08}
SIDES = {"eager": {"kernels": 30}, "compiled": {"kernels": 12}}
BREAKS = [{"file": "models.py", "line": 7}]


def section(verdict="slower", coverage=1.0, breaks=(), kernels_share=0.4, sides=SIDES, **parts):
    profile = {"seconds": 1.0, "library_calls": {"aten::mm": 19, "aten::addmm": 8}, **PARTS, **parts}
    return {"verdict": verdict, "coverage": coverage, "breaks": list(breaks), "kernels_share": kernels_share,
            "sides": sides, "profile": profile}


@pytest.mark.parametrize(("planted", "text"), [
    ({"coverage": 0.4, "breaks": BREAKS}, "60% of the operator calls run outside of compiled graphs; the first graph "
                                          "break is at models.py:7: move what breaks the graph out of forward"),
    ({"coverage": 0.4}, "60% of the operator calls run outside of compiled graphs: see the check `compiles`"),
    ({"guards": 0.3}, "Dynamo's guards take 30% of a compiled step (300000 µs): "),
    ({"python": 0.7, "breaks": BREAKS}, "70% of a compiled step passes in Python, outside of graphs and operators, the "
                                        "first graph break being at models.py:7: take prints"),
    ({"kernels_share": 1.0, "sides": {"eager": {"kernels": 12}, "compiled": {"kernels": 12}}},
     "a compiled step runs 12 kernels and an eager one 12, so nothing was fused: "),
    ({"library": 0.8}, "80% of a compiled step is library calls that eager makes too (19 x aten::mm, 8 x aten::addmm)"),
    ({"library": 0.6, "guards": 0.2}, "60% of a compiled step is library calls"),
    ({"library": 0.5, "python": 0.6}, "60% of a compiled step passes in Python"),
])
def test_each_cause_is_named_and_the_largest_first(planted, text):
    assert slow_cause(section(**planted)).startswith(text)
    assert slow_cause(section("no difference", **planted)).startswith(text)


@pytest.mark.parametrize("verdict", ["faster", "could not be told"])
def test_what_is_not_slow_has_no_cause(verdict):
    assert slow_cause(section(verdict, coverage=0.1, library=0.9)) == ""


@pytest.mark.parametrize("known", [section(), {"verdict": "slower"}, {"verdict": "slower", "profile": None}])
def test_without_evidence_nothing_is_said(known):
    assert slow_cause(known) == ""
