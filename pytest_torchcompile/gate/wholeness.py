"""Wholeness: is everything there that was planned, does it agree with itself, is it the run that the policy is for?"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_torchcompile import __version__
from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.gate.judged import BAD, JudgedCell, verdicts_in
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.plan.matrix_path import is_shipped
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.finding import Finding, Weight, contradiction_finding
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.report.reading import Report
from pytest_torchcompile.report.record import gate_verdicts
from pytest_torchcompile.report.schema import ENVIRONMENT_KEYS

__all__ = ["check_expectations", "check_wholeness"]


def check_wholeness(merged: Merged, cells: Mapping[str, JudgedCell], policy: Policy) -> Iterator[Finding]:
    """What is missing from the run, and where the reports contradict themselves."""
    for problem in merged.problems:
        missing: tuple[str, ...] = ()
        if "planned cells" in problem:
            missing = merged.missing
        yield Finding("missing", "unusable", problem, missing)
    yield from _missing_verdicts(merged, cells)
    wrong = {name: cell.contradictions for name, cell in cells.items() if cell.contradictions}
    if wrong:
        yield contradiction_finding("cell", wrong, merged.origin[next(iter(wrong))])
    if any(cell["planned"] is None for cell in merged.cells.values()):
        text = "the reports are of schema 1.0, which keeps no evidence that its verdicts can be held against"
        yield Finding("schema", "unusable", text, hint="run the matrix again with this version of pytest-torchcompile")
    for report in merged.reports:
        yield from _contradictions_in_report(report)
        yield from _failures_outside(report, policy)


def _missing_verdicts(merged: Merged, cells: Mapping[str, JudgedCell]) -> Iterator[Finding]:
    short = {name: cell.missing for name, cell in cells.items() if cell.missing}
    if short:
        checks: dict[str, None] = {}
        for names in short.values():
            checks.update(dict.fromkeys(names))
        text = f"{count(len(short), 'cell has', 'cells have')} no verdict of {', '.join(checks)}, " \
               "which the matrix asks for"
        yield Finding("missing", "unusable", text, tuple(short), hint="run all checks, without --compile-checks")
    # A cell that has no verdict at all has this status too.
    idle = [name for name, cell in cells.items() if cell.status == "not_run"]
    # A partial run has said already which of its cells never came.
    if idle and not merged.partial:
        text = f"{count(len(idle), 'cell has', 'cells have')} verdicts that never came"
        yield Finding("missing", "unusable", text, tuple(idle))


def _contradictions_in_report(report: Report) -> Iterator[Finding]:
    """Do the parts of one report agree? What it says to be bad is believed."""
    # Another version may tell other keys.
    missing = [key for key in ENVIRONMENT_KEYS if key not in report.block["environment"]]
    ours = (report.block["run"] or {}).get("plugin") == __version__
    if missing and ours and _has_sections(report):
        text = f"{report.name} does not tell the environment in which its cells ran: no {first_names(missing)}"
        yield Finding("contradiction", "unusable", text)
    for cell in report.cells:
        # A status alone can't say why, and yet it must not be dropped.
        if cell["status"] in BAD and set(BAD).isdisjoint(verdicts_in(cell["checks"])):
            text = f"{report.name}: a cell's status is {cell['status']}, though none of its checks says so"
            yield Finding("contradiction", "fail", text, (cell["id"],))
    # Gates are stated at the top of a report, for those who read nothing else; they have to follow from the cells.
    for name, stated in gate_verdicts(report.block["matrix"]["checks"], report.cells).items():
        claimed = report.block["gates"].get(name, {"verdict": "missing"})["verdict"]
        if claimed != stated["verdict"]:
            # What is said to be bad is believed; what is said to be good and is not makes the report worthless.
            weight: Weight = "unusable"
            if claimed in BAD:
                weight = "fail"
            text = f"{report.name}: the gate {name} is said to be {claimed}, and its cells say {stated['verdict']}"
            yield Finding("contradiction", weight, text)


def _has_sections(report: Report) -> bool:
    return any(cell["observation"] and cell["observation"]["sections"] for cell in report.cells)


def _failures_outside(report: Report, policy: Policy) -> Iterator[Finding]:
    """Did something fail in that pytest run which is no cell, and no test that uses our fixtures?"""
    others = report.others_failed
    if others:
        text = f"{report.name}: {count(len(others), 'other test')} of that pytest run failed, which the gate does " \
               f"not judge: {first_names(others)}"
        if policy.other_tests:
            yield Finding("other_tests", "fail", text, file=policy.path, line=policy.line_of("other_tests"))
        else:
            yield Finding("other_tests", "note", text, hint="`other_tests: fail` in a policy makes that a failure")
        return
    # Pytest's exit status 1: some test failed.
    if (report.block["run"] or {}).get("exit_status") == 1 and not _failed_somewhere(report):
        text = "pytest ended with 1, though no cell or test failed: something failed that the report does not show"
        yield Finding("contradiction", "unusable", f"{report.name}: {text}")


def _failed_somewhere(report: Report) -> bool:
    verdicts = {test["verdict"] for test in report.block["tests"]}
    for cell in report.cells:
        verdicts.update(verdicts_in(cell["checks"]))
    return not verdicts.isdisjoint((*BAD, "not_run"))


def check_expectations(merged: Merged, policy: Policy) -> Iterator[Finding]:
    """Is it the run that the policy is for? Raises MatrixError if the policy's matrix can't be read."""
    for key, pattern in policy.environment.items():
        value = str(merged.environment.get(key))
        if not fnmatch.fnmatchcase(value, pattern):
            yield Finding("environment", "unusable", f"{key} is {value}, and {policy.path} is for {pattern}",
                          file=policy.path, line=policy.line_of("environment"))
    if policy.matrix:
        yield from _check_matrix(merged, policy)


def _check_matrix(merged: Merged, policy: Policy) -> Iterator[Finding]:
    from pytest_torchcompile.plan.matrix import load_matrix

    line = policy.line_of("matrix")
    path = Path(policy.matrix)
    if not is_shipped(policy.matrix):
        path = Path(policy.path).parent / policy.matrix
        if not path.is_file():
            raise MatrixError(policy.path, line, 1, f"matrix: there is no file {path}")
    # The file may be the same and plan other cells, under another version of this package.
    matrix = load_matrix(path, shown=str(path))
    if matrix.sha256 != merged.matrix["sha256"]:
        text = f"the reports are of another {merged.matrix['path']} than {path} is now"
        yield Finding("matrix", "unusable", text, file=policy.path, line=line)
    elif [each.cell.id for each in matrix.cells] != merged.matrix["cells_planned"]:
        text = f"the reports plan other cells than {path} expands to"
        yield Finding("matrix", "unusable", text, file=policy.path, line=line)
