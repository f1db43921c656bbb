"""Wholeness: is everything there that was planned, does it agree with itself, is it the run that the policy is for?"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_torchcompile import __version__
from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.gate.judged import BAD, JudgedCell
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.plan.matrix_path import is_shipped
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.finding import Finding, Weight, contradiction_finding
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.report.reading import Report
from pytest_torchcompile.report.record import gate_verdicts
from pytest_torchcompile.report.schema import ENVIRONMENT_KEYS

__all__ = ["expected", "whole"]


def whole(merged: Merged, cells: Mapping[str, JudgedCell], policy: Policy) -> Iterator[Finding]:
    """What is missing from the run, and where the reports contradict themselves."""
    for problem in merged.problems:
        yield Finding("missing", "unusable", problem, merged.missing if "planned cells" in problem else ())
    short = {name: cell.missing for name, cell in cells.items() if cell.missing}
    if short:
        checks = ", ".join(dict.fromkeys(check for names in short.values() for check in names))
        text = f"{count(len(short), 'cell has', 'cells have')} no verdict of {checks}, which the matrix asks for"
        yield Finding("missing", "unusable", text, tuple(short), hint="run all checks, without --compile-checks")
    idle = [name for name, cell in cells.items() if cell.status == "not_run"]  # also where it has no verdict at all
    if idle and not merged.partial:
        text = f"{count(len(idle), 'cell has', 'cells have')} verdicts that never came"
        yield Finding("missing", "unusable", text, tuple(idle))
    wrong = {name: cell.contradictions for name, cell in cells.items() if cell.contradictions}
    if wrong:
        yield contradiction_finding("cell", wrong, merged.origin[next(iter(wrong))])
    if any(cell["planned"] is None for cell in merged.cells.values()):
        text = "the reports are of schema 1.0, which keeps no evidence that its verdicts can be held against"
        yield Finding("schema", "unusable", text, hint="run the matrix again with this version of pytest-torchcompile")
    for report in merged.reports:
        yield from _report(report, policy)


def _report(report: Report, policy: Policy) -> Iterator[Finding]:
    """Do the parts of one report agree? What it says to be bad is believed."""
    untold = [key for key in ENVIRONMENT_KEYS if key not in report.block["environment"]]
    ours = (report.block["run"] or {}).get("plugin") == __version__
    if untold and ours and any(cell["observation"] and cell["observation"]["sections"] for cell in report.cells):
        text = f"{report.name} does not tell the environment in which its cells ran: no {first_names(untold)}"
        yield Finding("contradiction", "unusable", text)
    failed = any(test["verdict"] in (*BAD, "not_run") for test in report.block["tests"])
    for cell in report.cells:
        verdicts = {check["verdict"] for check in cell["checks"].values()}
        bad = not verdicts.isdisjoint(BAD)
        failed = failed or bad or "not_run" in verdicts
        if cell["status"] in BAD and not bad:
            text = f"{report.name}: a cell's status is {cell['status']}, though none of its checks says so"
            yield Finding("contradiction", "fail", text, (cell["id"],))
    for name, stated in gate_verdicts(report.block["matrix"]["checks"], report.cells).items():
        claimed = report.block["gates"].get(name, {"verdict": "missing"})["verdict"]
        if claimed != stated["verdict"]:
            weight: Weight = "fail" if claimed in BAD else "unusable"
            text = f"{report.name}: the gate {name} is said to be {claimed}, and its cells say {stated['verdict']}"
            yield Finding("contradiction", weight, text)
    status = (report.block["run"] or {}).get("exit_status")
    if failed_too := report.others_failed:
        other = count(len(failed_too), "other test")
        named = first_names(failed_too)
        text = f"{report.name}: {other} of that pytest run failed, which the gate does not judge: {named}"
        if policy.other_tests:
            yield Finding("other_tests", "fail", text, file=policy.path,
                          line=policy.line(policy.places["other_tests"]))
        else:
            yield Finding("other_tests", "note", text, hint="`other_tests: fail` in a policy makes that a failure")
    elif status == 1 and not failed:
        text = "pytest ended with 1, though no cell or test failed: something failed that the report does not show"
        yield Finding("contradiction", "unusable", f"{report.name}: {text}")


def expected(merged: Merged, policy: Policy) -> Iterator[Finding]:
    """Is it the run that the policy is for? Raises MatrixError if the policy's matrix can't be read."""
    for key, pattern in policy.environment.items():
        found = str(merged.environment.get(key))
        if not fnmatch.fnmatchcase(found, pattern):
            yield Finding("environment", "unusable", f"{key} is {found}, and {policy.path} is for {pattern}",
                          file=policy.path, line=policy.line(policy.places["environment"]))
    if policy.matrix:
        from pytest_torchcompile.plan.matrix import load_matrix

        place: dict[str, Any] = {"file": policy.path, "line": policy.line(policy.places["matrix"])}
        path = Path(policy.matrix) if is_shipped(policy.matrix) else Path(policy.path).parent / policy.matrix
        if not (is_shipped(policy.matrix) or path.is_file()):
            raise MatrixError(policy.path, place["line"], 1, f"matrix: there is no file {path}")
        matrix = load_matrix(path, shown=str(path))
        if matrix.sha256 != merged.matrix["sha256"]:
            text = f"the reports are of another {merged.matrix['path']} than {path} is now"
            yield Finding("matrix", "unusable", text, **place)
        elif [each.cell.id for each in matrix.cells] != merged.matrix["cells_planned"]:
            yield Finding("matrix", "unusable", f"the reports plan other cells than {path} expands to", **place)
