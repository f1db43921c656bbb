"""Tests judged again from their ledgers, as cells are from their observations.

A test that passed is judged by the same function as in its run: its limits, and whether what it asked for ran compiled.
Whether its body held only the run could see, so a verdict that is worse than the ledger's is believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pytest_torchcompile.checks import fails_by_wrong_numbers
from pytest_torchcompile.checks.severity import NUMBERS_OF_TESTS, TEST_CHECK
from pytest_torchcompile.gate.judged import GOOD, JudgedCell, contradictions_in, ids_of, names_with_status
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.ledger.ledger import Ledger
from pytest_torchcompile.ledger.records import SILENT
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.finding import Finding, contradiction_finding
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.report.provenance import fingerprint
from pytest_torchcompile.report.record import count_ledger
from pytest_torchcompile.report.schema import TEST_LANE

__all__ = ["check_tests", "demand_tests", "facts_of_test", "judge_test", "judge_tests"]


def judge_tests(merged: Merged, ours: bool) -> dict[str, JudgedCell]:
    """Every test of the run, by node id. ``ours``: the reports are of this very version."""
    return {name: judge_test(record, ours) for name, record in merged.tests.items()}


def judge_test(record: Mapping[str, Any], ours: bool) -> JudgedCell:
    """Judge one test of a report; what is worse holds, its own verdict or that of its ledger."""
    check = {"verdict": record["verdict"], "problems": record["problems"], "note": record["note"]}
    judged = JudgedCell(record["id"], {}, {TEST_CHECK: check}, _sections_of_ledger(record["ledger"]),
                        record["seconds"], record["counts"]["runs"] > 0, claimed=TEST_LANE)
    if record["verdict"] == "xfail" and _computes_wrong_numbers(record["problems"]):
        judged.verdicts[TEST_CHECK] = {"verdict": "fail", "problems": _not_hidden(record["problems"])}
    try:
        _hold_against_ledger(judged, record, ours)
    # A ledger may hold anything that is JSON, and is judged as a sound one.
    except Exception as error:
        judged.contradictions.append(f"its ledger can't be judged: {type(error).__name__}: {error}")
    return judged


def _computes_wrong_numbers(problems: Iterable[Mapping[str, Any]]) -> bool:
    """Does a test with these problems fail by wrong numbers?"""
    return fails_by_wrong_numbers(TEST_CHECK, "fail", [problem["message"] for problem in problems])


def _not_hidden(problems: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The failures of a test with an xfail, which hides no wrong numbers, and what to write if they are known."""
    hint = "an xfail of pytest names no check, so the gate hides no wrong numbers by it; if these are known, allow " \
           f"them in a policy: `allowed_failures` with `tests:` and `checks: [{NUMBERS_OF_TESTS}]`"
    return [{**problem, "hint": hint} for problem in problems]


def _hold_against_ledger(judged: JudgedCell, record: Mapping[str, Any], ours: bool) -> None:
    if _record_fingerprint(record) != record["evidence_sha256"]:
        judged.contradictions.append("it is not what was judged: it was damaged or edited since")
    if record["counts"] != count_ledger(record["ledger"]):
        judged.contradictions.append("its counts are not those of its ledger")
    if record["verdict"] != "pass":
        return
    why_not = _why_it_cannot_pass(record)
    if not why_not:
        return
    message = why_not.splitlines()[0]
    if ours:
        judged.contradictions.append(f"the report says pass, its ledger says {message}")
    # Judged by its ledger from here on, so that everything behind it sees a failure.
    problem = {"message": message, "evidence": why_not, "hint": "", "file": "", "line": 0}
    judged.verdicts[TEST_CHECK] = {"verdict": "fail", "problems": [problem]}


def _why_it_cannot_pass(record: Mapping[str, Any]) -> str:
    """Why a test can't have passed; empty if it can."""
    # Reports without tests are judged without loading these.
    from pytest_torchcompile.plan.markers import MarkerLimits
    from pytest_torchcompile.run.counters import Evidence, ModelCalls

    # A test with a problem has not passed, whatever its ledger says.
    if record["problems"]:
        return str(record["problems"][0]["message"])
    if record["ledger"] is None:
        return "nothing: it has none"
    limits, model = None, None
    if record["limits"]:
        limits = MarkerLimits(**record["limits"])
    if record["model"] is not None:
        model = ModelCalls(record["model"]["called"], record["model"]["ran"])
    evidence = Evidence(ledger=Ledger.from_dict(record["ledger"]), limits=limits, must_run=record["must_run"],
                        asks_model=record["asks_model"], model=model)
    return evidence.problem()


def _record_fingerprint(record: Mapping[str, Any]) -> str:
    # The fingerprint is over all but itself.
    evidence = dict(record)
    evidence.pop("evidence_sha256", None)
    try:
        return fingerprint(evidence)
    except ValueError:  # a number too large for a float
        return ""


def _sections_of_ledger(ledger: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
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


def check_tests(merged: Merged, tests: Mapping[str, JudgedCell]) -> Iterator[Finding]:
    """Tests that are missing, and where the reports contradict themselves."""
    for report in merged.reports:
        recorded = [test["id"] for test in report.block["tests"]]
        # As lists: a test that is there twice is as wrong as one that is missing.
        if sorted(recorded) != sorted(report.block["tests_planned"]):
            text = f"{report.name}: the tests that it tells of are not those that it planned"
            yield Finding("contradiction", "unusable", text, hint="use the report as the run wrote it")
    yield from _deselected_tests(merged, tests)
    idle = names_with_status(tests, "not_run")
    if idle:
        text = f"{count(len(idle), 'planned test was', 'planned tests were')} not run: {first_names(idle)}"
        yield Finding("missing", "unusable", text, tuple(idle))
    wrong = contradictions_in(tests)
    if wrong:
        yield contradiction_finding("test", wrong)


def _deselected_tests(merged: Merged, tests: Mapping[str, JudgedCell]) -> Iterator[Finding]:
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
        yield Finding("tests", "fail", text, file=policy.path, line=policy.line_of("tests"))
    quiet = ids_of(test for test in tests.values() if test.status in GOOD and _has_silent_frames(test))
    if quiet:
        text = (f"{count(len(quiet), 'test holds', 'tests hold')}, though torch silently ran something in it eagerly: "
                f"{first_names(quiet)}")
        yield Finding("silent_eager", "note", text, quiet,
                      hint="compile_limits(eager_frames=0) makes that a failure")


def _has_silent_frames(test: JudgedCell) -> bool:
    for frame in test.sections.get("compiles", {}).get("eager_frames", ()):
        # It is judged as a sound ledger, yet a record in it may be anything that is JSON.
        if isinstance(frame, dict) and frame.get("kind") in SILENT:
            return True
    return False
