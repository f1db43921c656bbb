"""Proof: what a record must have for a verdict on compiled code to rest on it. Plain data, no torch."""

from __future__ import annotations

import pytest

from pytest_torchcompile.oracle.proof import compiled_code_ran, doubts, graph_runs

PROVEN = {"graphs": [{"runs": 2}, {"runs": 0}], "eager_frames": [], "lost": [], "all_zero": [False, False],
          "eager_all_zero": [False, False]}


def frame(kind="limit", line=5, **changes):
    return {"function": "forward", "file": "net.py", "line": line, "kind": kind, "reason": "no graph"} | changes


def messages(**changes):
    return [problem.message for problem in doubts(PROVEN | changes)]


def test_one_graph_that_ran_is_proof():
    """Others need not have run: a graph of a branch that no call took is no doubt."""
    assert not messages()
    assert compiled_code_ran({"compiles": PROVEN})
    assert graph_runs(PROVEN) == 2


@pytest.mark.parametrize("sections", [
    {}, {"compiles": {}}, {"compiles": {"graphs": []}}, {"compiles": {"graphs": [{"runs": 0}]}},
])
def test_a_record_without_a_run_is_none(sections):
    """Also one that was ended before its section was complete."""
    assert not compiled_code_ran(sections)


def test_graphs_that_never_ran_prove_nothing():
    assert messages(graphs=[{"runs": 0}]) == ["graphs were compiled, but none was ever executed"]


def test_without_a_graph_what_ran_eagerly_is_the_evidence():
    """And no further doubt: all of them follow from it."""
    (problem,) = doubts(PROVEN | {"graphs": [], "eager_frames": [frame()], "all_zero": [True], "lost": ["x"]})
    assert problem.message == "nothing was compiled: no graph reached the backend"
    assert problem.evidence == "forward  net.py:5  limit: no graph"


def test_torchs_own_classes_compiled_in_place_have_a_hint_of_their_own():
    (skipped,) = doubts(PROVEN | {"graphs": [], "eager_frames": [frame("skipped")]})
    (other,) = doubts(PROVEN | {"graphs": []})
    assert "code of torch's own classes" in skipped.hint
    assert skipped.hint != other.hint


def test_silent_frames_are_told_once_for_each_place():
    """Ten threads at one line are one problem with ten frames; another line is another one."""
    from pytest_torchcompile.ledger.records import SILENT

    kind = min(SILENT)
    found = list(doubts(PROVEN | {"eager_frames": [frame(kind), frame(kind), frame(kind, 9)]}))
    assert [problem.message for problem in found] == [
        f"2 frame(s) silently ran eagerly: {kind} in forward", f"1 frame(s) silently ran eagerly: {kind} in forward"]
    assert [problem.line for problem in found] == [5, 9]


def test_what_torch_told_of_is_not_silent():
    """A frame behind a graph break is told by the check `graph_breaks`."""
    from pytest_torchcompile.ledger.records import SILENT

    told = frame("graph_break")
    assert told["kind"] not in SILENT
    assert not messages(eager_frames=[told])


def test_only_the_rest_of_a_function_is_told_as_that():
    """Where one of the frames is the function from its beginning, all of it ran eagerly."""
    from pytest_torchcompile.ledger.records import SILENT

    kind = min(SILENT)
    rest = frame(kind, resumed_at=7)
    assert messages(eager_frames=[rest]) == [
        f"1 frame(s) silently ran eagerly: {kind} in the rest of forward behind a graph break"]
    assert messages(eager_frames=[rest, frame(kind)]) == [f"2 frame(s) silently ran eagerly: {kind} in forward"]


def test_a_ledger_that_lost_something_does_not_vouch():
    (problem,) = doubts(PROVEN | {"lost": ["compile_start without an end"]})
    assert problem.message.startswith("the ledger could not read everything that torch reported")
    assert problem.evidence == "compile_start without an end"


@pytest.mark.parametrize(("compiled", "eager", "says"), [
    ([True, True], [False, False], ["every output of the compiled model is zero, NaN or infinite"]),
    ([True, True], [True, False], ["every output of the compiled model is zero, NaN or infinite"]),
    ([True, True], [True, True],
     ["every output is zero, NaN or infinite, compiled and eager: their equality proves nothing"]),
    ([True, False], [True, True], []),
    # Every call raised: there is no output to doubt.
    ([], [], []),
])
def test_outputs_of_zeros_prove_nothing(compiled, eager, says):
    assert messages(all_zero=compiled, eager_all_zero=eager) == says
