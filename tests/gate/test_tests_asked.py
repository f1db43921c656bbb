"""What a policy asks of the tests as a whole, and what is said of tests that hold though something ran eagerly."""

from __future__ import annotations

import pytest

from pytest_torchcompile.checks.severity import TEST_CHECK
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.gate.testjudged import demand_tests
from pytest_torchcompile.ledger.records import SILENT
from pytest_torchcompile.report.schema import TEST_LANE


def judged(verdict: str = "pass", compiled: bool = True, kinds: tuple[object, ...] = ()) -> JudgedCell:
    frames = [{"kind": kind} if isinstance(kind, str) else kind for kind in kinds]
    verdicts = {TEST_CHECK: {"verdict": verdict, "problems": []}}
    return JudgedCell("t", {}, verdicts, {"compiles": {"eager_frames": frames}}, 1.0, compiled, claimed=TEST_LANE)


def found(policy: Policy, *tests: JudgedCell) -> list[tuple[str, str]]:
    by_name = {str(number): test for number, test in enumerate(tests)}
    return [(finding.kind, finding.weight) for finding in demand_tests(by_name, policy)]


@pytest.mark.parametrize(("wanted", "expected"), [(None, []), (0, []), (1, []), (2, [("tests", "fail")])])
def test_so_many_tests_must_have_run_compiled_code(monkeypatch, wanted, expected):
    """One that ran nothing compiled does not count, whatever its verdict."""
    monkeypatch.setattr(Policy, "line_of", lambda policy, key: 1)
    assert found(Policy(tests_ran_at_least=wanted), judged(), judged(compiled=False)) == expected


def test_silent_frames_of_a_test_that_holds_are_told():
    """Of one that fails they are told with the failure; a frame that is no record is left aside."""
    silent = sorted(SILENT)[0]
    assert found(Policy(), judged(kinds=(silent,))) == [("silent_eager", "note")]
    assert found(Policy(), judged("fail", kinds=(silent,))) == []
    assert found(Policy(), judged(kinds=("graph_break", 7, None))) == []
