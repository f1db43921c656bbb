"""Wholeness: is everything there that was planned, does it agree with itself, is it the run that the policy is for?

And what a policy demands of the run as a whole: gates that pass, cells and devices that really ran.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_torchcompile import __version__
from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.gate.baseline import Change
from pytest_torchcompile.gate.judged import BAD, JudgedCell, contradictions_in, ids_of, names_with_status
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.observation import verdicts_in
from pytest_torchcompile.plan.matrix_path import is_shipped
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.causes import Cause
from pytest_torchcompile.report.finding import Finding, Weight, contradiction_finding
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.report.reading import Report
from pytest_torchcompile.report.record import GATES, gate_verdicts
from pytest_torchcompile.report.schema import ENVIRONMENT_KEYS

__all__ = ["ExplainedFailures", "check_demands", "check_expectations", "check_wholeness", "nothing_to_judge"]


def check_wholeness(merged: Merged, cells: Mapping[str, JudgedCell], policy: Policy) -> Iterator[Finding]:
    """What is missing from the run, and where the reports contradict themselves."""
    for problem in merged.problems:
        missing: tuple[str, ...] = ()
        if problem == merged.unjudged:
            missing = merged.missing
        yield Finding("missing", "unusable", problem, missing)
    yield from _missing_verdicts(merged, cells)
    wrong = contradictions_in(cells)
    if wrong:
        yield contradiction_finding("cell", wrong, merged.origin[next(iter(wrong))])
    # Green without evidence cannot be told from green that was written by hand.
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
    idle = names_with_status(cells, "not_run")
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
    elif matrix.cell_ids != merged.matrix["cells_planned"]:
        text = f"the reports plan other cells than {path} expands to"
        yield Finding("matrix", "unusable", text, file=policy.path, line=line)


# ------------------------------------------------------------------------------------- what a policy demands of the run
class ExplainedFailures:
    """What the causes have said already, so that no demand and no difference says it once more.

    Each cause fails the gate, so what is left out here changes no exit code.
    """

    def __init__(self, causes: Iterable[Cause]) -> None:
        self._by_cell: dict[str, list[Cause]] = {}
        for cause in causes:
            for cell in cause.cells:
                self._by_cell.setdefault(cell, []).append(cause)

    def cause_of(self, cell: str, check: str) -> Cause | None:
        """The cause that says why the check of the cell fails."""
        for cause in self._by_cell.get(cell, ()):
            if check in cause.checks or check in cause.consequences:
                return cause
        return None

    def explain_gate(self, name: str, cells: Iterable[str]) -> bool:
        """Is it told why each of the cells keeps the gate from passing? The causes then name the gate."""
        causes = []
        for cell in cells:
            cause = self.cause_of(cell, name)
            if cause is None:
                return False
            causes.append(cause)
        for cause in causes:
            if name not in cause.gates:
                cause.gates.append(name)
        return bool(causes)

    def explain_change(self, change: Change, cells: Iterable[str]) -> bool:
        """Is it told of each of these cells that it is worse than in the baseline, and why?"""
        if change.kind == "failures":
            return all(self.cause_of(cell, change.check) for cell in cells)
        if change.kind == "graph_breaks":
            return all(self._has_cause_at(cell, change) for cell in cells)
        if change.kind == "recompiles":
            return all(self._explains_recompile(cell, change) for cell in cells)
        return False

    def _has_cause_at(self, cell: str, change: Change) -> bool:
        for cause in self._by_cell.get(cell, ()):
            if (cause.problem.file, cause.problem.line) == (change.file, change.line):
                return True
        return False

    def _explains_recompile(self, cell: str, change: Change) -> bool:
        """By a cause at its function; or it follows from a new graph break, after which the rest compiles apart."""
        if self._has_cause_at(cell, change):
            return True
        broke = any(cause.new and "graph_breaks" in cause.checks for cause in self._by_cell.get(cell, ()))
        return broke and self.cause_of(cell, "recompiles") is None


def check_demands(merged: Merged, cells: Mapping[str, JudgedCell], policy: Policy,
                  excused: Mapping[str, str], explained: ExplainedFailures) -> Iterator[Finding]:
    """What the default rule and the policy ask of the run as a whole.

    Args:
        merged: The run.
        cells: Its cells, judged.
        policy: Whose demands they are.
        excused: Cells whose failures are allowed.
        explained: Why the others fail, which is not told once more for a gate.
    """
    yield from _check_gates(merged, cells, policy, excused, explained)
    ran = [cell for cell in cells.values() if cell.ran]
    if policy.ran_at_least is not None and len(ran) < policy.ran_at_least:
        text = f"{count(len(ran), 'cell')} ran compiled code, at least {policy.ran_at_least} wanted"
        yield Finding("ran_at_least", "fail", text, file=policy.path, line=policy.line_of("ran_at_least"))
    # A cell names its device as torch does, perhaps with an index: cuda:1.
    used = {str(cell.axes.get("device")).partition(":")[0] for cell in ran}
    for pattern in policy.devices:
        names = list(map(str, merged.environment.get("devices") or ()))
        wanted = {_device_type(name) for name in names if fnmatch.fnmatchcase(name, pattern)}
        if wanted.isdisjoint(used):
            why = "no cell ran on it"
            if not wanted:
                why = f"there were only {', '.join(names) or 'none'}"
            yield Finding("devices", "fail", f"the device {pattern} is wanted, and {why}",
                          file=policy.path, line=policy.line_of("devices"))


def _device_type(device: str) -> str:
    """The axis' value for a device of the environment: that names GPUs as CUDA does."""
    if device == "cpu":
        return "cpu"
    return "cuda"


def _check_gates(merged: Merged, cells: Mapping[str, JudgedCell], policy: Policy,
                 excused: Mapping[str, str], explained: ExplainedFailures) -> Iterator[Finding]:
    """A gate that the policy names allows no excuse; one that only the matrix runs, those of its cells."""
    own = [name for name in GATES if name in merged.matrix["checks"]]
    all_cells = list(map(_cell_with_verdicts, cells.values()))
    strict = gate_verdicts(own, all_cells)
    mild = gate_verdicts(own, [cell for cell in all_cells if cell["id"] not in excused])
    # Of a gate of the matrix the judged cells decide; of another one the reports' own word is all there is.
    for name in dict.fromkeys((*own, *merged.gates, *policy.gates)):
        stated = merged.gates
        if name in own:
            stated = mild
            if name in policy.gates:
                stated = strict
        if name in stated:
            finding = _gate_not_passed(name, stated[name], cells, explained)
        elif name in strict:
            finding = None  # every cell that has it is excused
        else:
            incomplete = bool(merged.problems) or any(cell.missing for cell in cells.values())
            finding = _gate_not_run(name, incomplete, name in own, merged.matrix["path"])
        if finding is not None:
            yield finding


def _cell_with_verdicts(cell: JudgedCell) -> dict[str, Any]:
    return {"id": cell.id, "checks": cell.verdicts}


def _gate_not_run(name: str, incomplete: bool, in_matrix: bool, matrix: str) -> Finding:
    text = f"the gate {name} was not run"
    # What is missing of the run may have run it.
    if incomplete:
        return Finding("gate", "unusable", text, hint="it may be in what is missing of the run")
    hint = f"add {name} to the key checks of {matrix}"
    if in_matrix:
        hint = "no cell of this run can: those of several ranks and of the fake lane have no such check; add a cell " \
               f"with wrapper: none to {matrix}"
    return Finding("gate", "fail", text, hint=hint)


def _gate_not_passed(name: str, stated: Mapping[str, Any], cells: Mapping[str, JudgedCell],
                     explained: ExplainedFailures) -> Finding | None:
    verdict = stated["verdict"]
    if verdict == "pass":
        return None
    # A gate has to pass: also an expected failure keeps it from passing.
    in_the_way = (*BAD, "xfail", "not_run")
    cells_behind = []
    for cell in cells.values():
        if cell.verdicts.get(name, {}).get("verdict") in in_the_way:
            cells_behind.append(cell)
    behind = ids_of(cells_behind)
    if explained.explain_gate(name, behind):
        return None
    # Nothing has failed: the run was interrupted, or is another one's to finish.
    if verdict == "not_run":
        text = f"the gate {name} was not judged"
        if behind:
            text += f" in {count(len(behind), 'cell')}"
        return Finding("gate", "unusable", text, behind, hint="run what is missing")
    text = f"the gate {name} does not pass ({verdict})"
    if stated["problems"]:
        text += f": {stated['problems'][0]['message']}"
    hint = ""
    if verdict == "xfail":
        hint = "a gate has to pass, and an expected failure does not: in place of the rule with xfail, take such " \
               "cells out by one with exclude, or excuse them in the policy (allowed_failures) until a day"
    return Finding("gate", "fail", text, behind, hint=hint)


def nothing_to_judge(merged: Merged, cells: Mapping[str, JudgedCell], tests: Mapping[str, JudgedCell]) -> Finding:
    """Why there is nothing to judge."""
    return Finding("nothing", "nothing", _why_nothing(merged, list(cells.values()), bool(tests)))


def _why_nothing(merged: Merged, cells: list[JudgedCell], has_tests: bool) -> str:
    if not merged.matrix["cells_planned"]:
        if has_tests:
            return "no cell was planned, and no test that holds ran compiled code"
        return "no cell was planned"
    reasons = [cell.skipped for cell in cells if cell.skipped is not None]
    if reasons and len(reasons) == len(cells):
        text = "the only cell was skipped"
        if len(cells) > 1:
            text = f"all {count(len(cells), 'cell')} were skipped"
        if reasons[0]:
            text += f": {reasons[0]}"
        return text
    compiled = [cell for cell in cells if cell.compiled]
    # Nothing counts here that passed in a real lane, so what passed is of the fake one.
    if any(cell.status == "pass" for cell in compiled):
        return "only cells of the fake lane hold, whose numbers mean nothing"
    if compiled:
        return "not one cell holds: all that ran is expected to fail, by the matrix or the policy"
    return "no cell ran compiled code, so nothing is proven"
