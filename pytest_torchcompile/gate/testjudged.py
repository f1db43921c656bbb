"""Tests judged again from their ledgers, as cells are from their observations.

A test that passed is judged by the same function as in its run: its limits, and whether what it asked for ran compiled.
Whether its body held only the run could see, so a verdict that is worse than the ledger's is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pytest_torchcompile.gate.judged import GOOD, JudgedCell
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.ledger.ledger import Ledger
from pytest_torchcompile.ledger.records import SILENT
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.evidence import fingerprint
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.finding import Finding, contradiction_finding
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.report.testrecord import TEST_CHECK, TEST_LANE, count_ledger

__all__ = ["demand_tests", "facts_of_test", "judge_test", "judge_tests", "whole_tests"]


def judge_tests(merged: Merged, ours: bool) -> dict[str, JudgedCell]:
    """Every test of the run, by node id. ``ours``: the reports are of this very version."""
    return {name: judge_test(told, ours) for name, told in merged.tests.items()}


def judge_test(told: Mapping[str, Any], ours: bool) -> JudgedCell:
    """Judge one test of a report; what is worse holds, its own verdict or that of its ledger."""
    sections = _sections(told["ledger"])
    check = {"verdict": told["verdict"], "problems": told["problems"], "note": told["note"]}
    judged = JudgedCell(told["id"], {}, {TEST_CHECK: check}, sections, told["seconds"], told["counts"]["runs"] > 0,
                        claimed=TEST_LANE)
    try:
        if _fingerprint(told) != told["evidence_sha256"]:
            judged.contradictions.append("it is not what was judged: it was damaged or edited since")
        if told["counts"] != count_ledger(told["ledger"]):
            judged.contradictions.append("its counts are not those of its ledger")
        if told["verdict"] == "pass" and (problem := _problem(told)):
            if ours:
                judged.contradictions.append(f"the report says pass, its ledger says {problem.splitlines()[0]}")
            problems = [{"message": problem.splitlines()[0], "evidence": problem, "hint": "", "file": "", "line": 0}]
            judged.verdicts[TEST_CHECK] = {"verdict": "fail", "problems": problems}
    except Exception as error:  # a ledger may hold anything that is JSON, and is judged as a sound one
        judged.contradictions.append(f"its ledger can't be judged: {type(error).__name__}: {error}")
    return judged


def _problem(told: Mapping[str, Any]) -> str:
    """Why a test can't have passed; empty if it can."""
    from pytest_torchcompile.plan.markers import MarkerLimits
    from pytest_torchcompile.run.counters import Evidence, ModelCalls

    if told["problems"]:
        return str(told["problems"][0]["message"])
    if told["ledger"] is None:
        return "nothing: it has none"
    evidence = Evidence(
        ledger=Ledger.from_dict(told["ledger"]), limits=MarkerLimits(**told["limits"]) if told["limits"] else None,
        must_run=told["must_run"], asks_model=told["asks_model"],
        model=None if told["model"] is None else ModelCalls(told["model"]["called"], told["model"]["ran"]),
    )
    return evidence.problem()


def _fingerprint(told: Mapping[str, Any]) -> str:
    try:
        return fingerprint({name: value for name, value in told.items() if name != "evidence_sha256"})
    except ValueError:  # a number too large for a float
        return ""


def _sections(ledger: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The ledger as the sections of a cell's observation, which baseline and page read."""
    if ledger is None:
        return {}
    return {
        "compiles": {name: ledger[name] for name in ("compiles", "graphs", "eager_frames")},
        "graph_breaks": {"graph_breaks": ledger["graph_breaks"]},
        "recompiles": {"recompiles": ledger["recompiles"]},
    }


def facts_of_test(judged: JudgedCell) -> Facts:
    """A judged test as typed records."""
    observation: dict[str, Any] = {"sections": judged.sections, "failure": None, "seconds": {}, "leaks": []}
    return Facts({"id": judged.id, "axes": {}, "status": judged.status, "checks": judged.verdicts,
                  "seconds": judged.seconds, "observation": observation})


def whole_tests(merged: Merged, tests: Mapping[str, JudgedCell]) -> Iterator[Finding]:
    """Tests that are missing, and where the reports contradict themselves."""
    for report in merged.reports:
        told = [test["id"] for test in report.block["tests"]]
        if sorted(told) != sorted(report.block["tests_planned"]):
            text = f"{report.name}: the tests that it tells of are not those that it planned"
            yield Finding("contradiction", "unusable", text, hint="use the report as the run wrote it")
    yield from _deselected(merged, tests)
    idle = [name for name, test in tests.items() if test.status == "not_run"]
    if idle:
        text = f"{count(len(idle), 'planned test was', 'planned tests were')} not run: {first_names(idle)}"
        yield Finding("missing", "unusable", text, tuple(idle))
    wrong = {name: test.contradictions for name, test in tests.items() if test.contradictions}
    if wrong:
        yield contradiction_finding("test", wrong)


def _deselected(merged: Merged, tests: Mapping[str, JudgedCell]) -> Iterator[Finding]:
    """Tests that the run was told to leave out, and that no report has."""
    left_out: dict[str, None] = {}
    for report in merged.reports:
        left_out.update(dict.fromkeys((report.block["run"] or {}).get("tests_deselected", ())))
    names = tuple(name for name in left_out if name not in tests)
    if names:
        what = count(len(names), "test that uses our fixtures was", "tests that use our fixtures were")
        yield Finding("deselected", "note", f"{what} deselected and not run: {first_names(names)}", names)


def demand_tests(tests: Mapping[str, JudgedCell], policy: Policy) -> Iterator[Finding]:
    """What the policy asks of the tests as a whole, and what they hide without failing."""
    ran = [test for test in tests.values() if test.ran]
    if policy.tests_ran_at_least is not None and len(ran) < policy.tests_ran_at_least:
        text = f"{count(len(ran), 'test')} ran compiled code, at least {policy.tests_ran_at_least} wanted"
        yield Finding("tests", "fail", text, file=policy.path, line=policy.line(policy.places["tests"]))
    quiet = [test.id for test in tests.values() if test.status in GOOD and _has_silent_frames(test)]
    if quiet:
        text = (f"{count(len(quiet), 'test holds', 'tests hold')}, though torch silently ran something in it eagerly: "
                f"{first_names(quiet)}")
        yield Finding("silent_eager", "note", text, tuple(quiet),
                      hint="compile_limits(eager_frames=0) makes that a failure")


def _has_silent_frames(test: JudgedCell) -> bool:
    frames = test.sections.get("compiles", {}).get("eager_frames", ())
    return any(isinstance(frame, dict) and frame.get("kind") in SILENT for frame in frames)
