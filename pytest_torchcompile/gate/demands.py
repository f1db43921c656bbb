"""Demands on the run as a whole: gates that pass, cells and devices that really ran."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_torchcompile.gate.judged import BAD, JudgedCell
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.gate.told import Told
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.finding import Finding
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.report.record import GATES
from pytest_torchcompile.report.record import gate_verdicts as gates_of

__all__ = ["demands", "nothing"]


def demands(merged: Merged, cells: Mapping[str, JudgedCell], policy: Policy,
            excused: Mapping[str, str], told: Told) -> Iterator[Finding]:
    """What the default rule and the policy ask of the run as a whole.

    Args:
        merged: The run.
        cells: Its cells, judged.
        policy: Whose demands they are.
        excused: Cells whose failures are allowed.
        told: Why the others fail, which is not told once more for a gate.
    """
    yield from _gates(merged, cells, policy, excused, told)
    ran = [cell for cell in cells.values() if cell.ran]
    if policy.ran_at_least is not None and len(ran) < policy.ran_at_least:
        yield Finding("ran_at_least", "fail",
                      f"{count(len(ran), 'cell')} ran compiled code, at least {policy.ran_at_least} wanted",
                      file=policy.path, line=policy.line(policy.places["ran_at_least"]))
    for pattern in policy.devices:
        names = [str(name) for name in merged.environment.get("devices") or ()]
        types = {_type(name) for name in names if fnmatch.fnmatchcase(name, pattern)}
        used = {str(cell.axes.get("device")).partition(":")[0] for cell in ran}
        if types.isdisjoint(used):
            what = "no cell ran on it" if types else f"there were only {', '.join(names) or 'none'}"
            yield Finding("devices", "fail", f"the device {pattern} is wanted, and {what}",
                          file=policy.path, line=policy.line(policy.places["devices"]))


def _type(device: str) -> str:
    """The axis' value for a device of the environment: that names GPUs as CUDA does."""
    return device if device == "cpu" else "cuda"


def _gates(merged: Merged, cells: Mapping[str, JudgedCell], policy: Policy,
           excused: Mapping[str, str], told: Told) -> Iterator[Finding]:
    """A gate that the policy names allows no excuse; one that only the matrix runs, those of its cells."""
    own = [name for name in GATES if name in merged.matrix["checks"]]
    strict = gates_of(own, [_of(cell) for cell in cells.values()])
    mild = gates_of(own, [_of(cell) for name, cell in cells.items() if name not in excused])
    for name in dict.fromkeys((*own, *merged.gates, *policy.gates)):
        stated = (strict if name in policy.gates else mild) if name in own else merged.gates
        if name not in stated:
            if name in strict:
                continue  # every cell that has it is excused
            if merged.problems or any(cell.missing for cell in cells.values()):
                yield Finding("gate", "unusable", f"the gate {name} was not run",
                              hint="it may be in what is missing of the run")
                continue
            yield Finding("gate", "fail", f"the gate {name} was not run",
                          hint="no cell of this run can: those of several ranks and of the fake lane have no such "
                               f"check; add a cell with wrapper: none to {merged.matrix['path']}" if name in own else
                               f"add {name} to the key checks of {merged.matrix['path']}")
        elif (verdict := stated[name]["verdict"]) != "pass":
            behind = [cell.id for cell in cells.values()
                      if cell.verdicts.get(name, {}).get("verdict") in (*BAD, "xfail", "not_run")]
            if told.gate(name, behind):
                continue
            why = "".join(f": {problem['message']}" for problem in stated[name]["problems"][:1])
            yield Finding("gate", "fail", f"the gate {name} does not pass ({verdict}){why}", tuple(behind))


def _of(cell: JudgedCell) -> dict[str, Any]:
    return {"id": cell.id, "checks": cell.verdicts}


def _all(cells: int) -> str:
    return "the only cell was" if cells == 1 else f"all {cells} cells were"


def nothing(merged: Merged, cells: Mapping[str, JudgedCell], tests: Mapping[str, JudgedCell]) -> Finding:
    """Why there is nothing to judge."""
    skipped = [reason for cell in cells.values() if (reason := cell.skipped) is not None]
    if not merged.matrix["cells_planned"]:
        text = "no cell was planned" + (", and no test that holds ran compiled code" if tests else "")
    elif skipped and len(skipped) == len(cells):
        text = f"{_all(len(skipped))} skipped" + (f": {skipped[0]}" if skipped[0] else "")
    elif any(cell.compiled and cell.status == "pass" for cell in cells.values()):
        text = "only cells of the fake lane hold, whose numbers mean nothing"
    elif any(cell.compiled for cell in cells.values()):
        text = "not one cell holds: all that ran is expected to fail, by the matrix or the policy"
    else:
        text = "no cell ran compiled code, so nothing is proven"
    return Finding("nothing", "nothing", text)
