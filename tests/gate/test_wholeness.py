"""What the gate asks of a run as a whole: why there is nothing to judge, and what a cause has told already."""

from __future__ import annotations

import datetime
from types import SimpleNamespace

import pytest
from runs import Run

from pytest_torchcompile.checks.severity import Effect, Severity
from pytest_torchcompile.gate.baseline import Change
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.wholeness import ExplainedFailures, nothing_to_judge
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.report.causes import Cause

TODAY = datetime.date(2026, 11, 21)
EFFECT = Effect(Severity.SLOW, "is slow", "are slow")


def cell(name, verdict="pass", compiled=False, note="", wrapper="none"):
    return JudgedCell(name, {"wrapper": wrapper}, {"compiles": {"verdict": verdict, "problems": [], "note": note}}, {},
                      1.0, compiled)


def cause(*cells, checks=("compiles",), consequences=(), file="", line=0, new=False):
    return Cause(Problem("m", file=file, line=line), EFFECT, checks=list(checks), consequences=list(consequences),
                 cells=list(cells), models=["m"], new=new)


# ------------------------------------------------------------------------------------------------------ what a cell is
@pytest.mark.parametrize(("judged", "lane", "proven", "ran", "holds"), [
    (cell("a", compiled=True), "single", True, True, True),
    (cell("a"), "single", False, False, False),
    (cell("a", "fail", True), "single", True, True, False),
    (cell("a", "xfail", True), "single", True, False, False),
    (cell("a", compiled=True, wrapper="ddp"), "ranks", True, True, True),
    (cell("a", compiled=True, wrapper="tp*fake8"), "fake", False, False, False),
])
def test_what_counts_as_run(judged, lane, proven, ran, holds):
    """Numbers of the fake lane mean nothing, and what is expected to fail does not hold."""
    assert (judged.lane, judged.proven, judged.ran, judged.holds) == (lane, proven, ran, holds)


@pytest.mark.parametrize(("claimed", "wrapper", "lane"), [
    ("fake", "of a newer version", "fake"), ("test", "none", "test"), ("ranks", "none", "single"),
    ("single", "tp*fake8", "fake"),
])
def test_a_report_may_say_less_of_its_lane_but_no_more(claimed, wrapper, lane):
    judged = cell("a", wrapper=wrapper)
    judged.claimed = claimed
    assert judged.lane == lane


@pytest.mark.parametrize(("judged", "why"), [
    (cell("a", "skip", note="no GPU"), "no GPU"), (cell("a", "skip"), ""), (cell("a", note="fine"), None),
])
def test_why_it_was_skipped(judged, why):
    assert judged.skipped == why


# ------------------------------------------------------------------------------------------------- nothing to be judged
@pytest.mark.parametrize(("cells", "tests", "text"), [
    ([], {}, "no cell was planned"),
    ([], {"t": cell("t")}, "no cell was planned, and no test that holds ran compiled code"),
    ([cell("a", "skip", note="no GPU")], {}, "the only cell was skipped: no GPU"),
    ([cell("a", "skip")], {}, "the only cell was skipped"),
    ([cell("a", "skip", note="no GPU"), cell("b", "skip", note="no nccl")], {}, "all 2 cells were skipped: no GPU"),
    ([cell("a", "skip", note="no GPU"), cell("b")], {}, "no cell ran compiled code, so nothing is proven"),
    ([cell("a"), cell("b", "xfail")], {}, "no cell ran compiled code, so nothing is proven"),
    ([cell("a", "xfail", True)], {},
     "not one cell holds: all that ran is expected to fail, by the matrix or the policy"),
    ([cell("a", "xfail", True), cell("b", compiled=True, wrapper="tp*fake8")], {},
     "only cells of the fake lane hold, whose numbers mean nothing"),
])
def test_why_there_is_nothing_to_judge(cells, tests, text):
    by_name = {each.id: each for each in cells}
    merged = SimpleNamespace(matrix={"cells_planned": list(by_name)})
    finding = nothing_to_judge(merged, by_name, tests)
    assert (finding.kind, finding.weight, finding.text) == ("nothing", "nothing", text)


# ---------------------------------------------------------------------------------------------------- what is told once
def test_the_cause_of_a_check():
    """Its own, or one that the check only follows from; of another cell or check there is none."""
    first, second = cause("a", consequences=["speedup"]), cause("a", "b", checks=["gradients"])
    explained = ExplainedFailures([first, second])
    assert explained.cause_of("a", "compiles") is first
    assert explained.cause_of("a", "speedup") is first
    assert explained.cause_of("a", "gradients") is second
    assert explained.cause_of("b", "compiles") is None
    assert explained.cause_of("c", "gradients") is None


def test_a_gate_is_told_with_the_causes_of_all_its_cells():
    first, second = cause("a", checks=["smoketest"]), cause("b", checks=["smoketest"])
    explained = ExplainedFailures([first, second])
    for _ in range(2):
        assert explained.explain_gate("smoketest", ["a", "b"])
    assert first.gates == second.gates == ["smoketest"]


@pytest.mark.parametrize("cells", [[], ["a", "b"], ["b"]])
def test_a_gate_with_a_cell_that_no_cause_explains_is_told(cells):
    """And no cause is said to be why."""
    first = cause("a", checks=["smoketest"])
    assert not ExplainedFailures([first]).explain_gate("smoketest", cells)
    assert first.gates == []


BROKE = cause("a", checks=["graph_breaks"], file="net.py", line=8, new=True)
BROKE_BEFORE = cause("a", checks=["graph_breaks"], file="net.py", line=8)
RECOMPILED = cause("a", checks=["recompiles"], file="net.py", line=30)


@pytest.mark.parametrize(("change", "causes", "explained"), [
    (Change("failures", "t", ("a",), check="compiles"), [cause("a")], True),
    (Change("failures", "t", ("a",), check="gradients"), [cause("a")], False),
    (Change("failures", "t", ("a", "b"), check="compiles"), [cause("a")], False),
    (Change("graph_breaks", "t", ("a",), "net.py", 8), [BROKE], True),
    (Change("graph_breaks", "t", ("a",), "net.py", 9), [BROKE], False),
    (Change("graph_breaks", "t", ("a",), "other.py", 8), [BROKE], False),
    (Change("recompiles", "t", ("a",), "net.py", 30), [RECOMPILED], True),
    # The rest after a new graph break compiles apart.
    (Change("recompiles", "t", ("a",), "net.py", 20), [BROKE], True),
    (Change("recompiles", "t", ("a",), "net.py", 20), [BROKE_BEFORE], False),
    (Change("recompiles", "t", ("a",), "net.py", 20), [BROKE, RECOMPILED], False),
    (Change("speedup", "t", ("a",)), [cause("a", checks=["speedup"])], False),
    (Change("new", "t", ("a",)), [cause("a")], False),
])
def test_a_change_that_its_cause_tells(change, causes, explained):
    assert ExplainedFailures(causes).explain_change(change, change.cells) == explained


# ------------------------------------------------------------------------------------------ gates that a report states
@pytest.mark.parametrize(("passes", "claimed", "code", "weight"), [
    (True, "pass", 0, None),
    (True, "fail", 1, "fail"),
    (True, "not_run", 2, "unusable"),
    (False, "pass", 1, "unusable"),
    (False, "fail", 1, None),
])
def test_a_gate_follows_from_its_cells(passes, claimed, code, weight):
    """What is said to be bad is believed; what is said to be good, and is not, makes the report worthless.

    The cell that fails fails the run all the same.
    """
    run = Run(model=["net"])
    run.checks = [*run.checks, "smoketest"]
    run.section(run.ids[0], "smoketest").update(
        raised=None, ok=passes, reason="a gradient differs", phase="comparison", step=1, compiles=0)
    (report,) = run.reports()
    assert report.block["gates"]["smoketest"]["verdict"] == ("pass" if passes else "fail")
    report.block["gates"]["smoketest"]["verdict"] = claimed
    found = gate([report], today=TODAY)
    assert found.code == code
    told = [finding.weight for finding in found.findings if "the gate smoketest is said to be" in finding.text]
    assert told == ([weight] if weight else [])
