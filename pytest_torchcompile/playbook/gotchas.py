"""Gotchas: what the report found wrong, at which line, in which stage of the compiler, and how to see it oneself."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pytest_torchcompile.checks import CHECKS, COMPARING
from pytest_torchcompile.gate.markdown import code_block, inline_code
from pytest_torchcompile.oracle.diagnosis import STAGES, stages_before
from pytest_torchcompile.playbook.prose import evidence, prose
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.causes import Cause, group_causes
from pytest_torchcompile.report.facts import Facts

__all__ = ["KNOBS", "gotchas"]

TITLE: Final = 100
VERDICTS: Final = ("xpass", "fail", "error", "timeout", "crash", "xfail")
KNOBS: Final[dict[str, str]] = {name: check.logs for name, check in CHECKS.items() if check.logs} | {
    "crash": "+dynamo,aot_graphs,output_code",
    "timeout": "+dynamo,output_code",
}
"""Check (or verdict, where the cell had no end) to the channels of ``TORCH_LOGS`` that show it."""


def gotchas(cells: Sequence[Facts], matrix: str) -> list[str]:
    """A paragraph for each cause, the worst first."""
    causes = group_causes(cells, VERDICTS)
    if not causes:
        return ["None: every check holds in every cell that ran.", ""]
    by_id = {cell.id: cell for cell in cells}
    lines: list[str] = []
    for number, cause in enumerate(causes, 1):
        lines += _paragraph(number, cause, by_id)
        lines += _how_to_see(cause, by_id, matrix)
    return lines


def _paragraph(number: int, cause: Cause, by_id: Mapping[str, Facts]) -> Iterator[str]:
    problem = cause.problem
    title = inline_code(problem.place) if problem.place else ", ".join(cause.checks)
    short = textwrap.shorten(problem.message, TITLE, placeholder=" ...")
    yield f"### {number}. {title}: {prose(short)}"
    yield ""
    where = f"In {count(len(cause.cells), 'cell')} {evidence(cause.cells)}"
    if cause.verdict == "xfail":
        where += " (known: a rule of the matrix expects it)"
    # A title that had to be cut is followed by the whole message.
    yield f"{where}." if short == problem.message else f"{where}. {prose(problem.message)}"
    yield ""
    for line in cause.further_lines():
        yield f"- {prose(line)}"
    if problem.hint:
        yield f"- Try: {prose(problem.hint)}"
    stage = _stage_to_blame(cause, by_id)
    if stage:
        yield f"- {stage}"


def _how_to_see(cause: Cause, by_id: Mapping[str, Facts], matrix: str) -> Iterator[str]:
    """The command that shows what torch logs of it."""
    judged = cause.verdict in ("fail", "xfail", "xpass")
    # A cell without an end is looked into by how it ended, whatever check it was in.
    channels = KNOBS.get(cause.checks[0] if judged else cause.verdict)
    if not channels:
        yield ""
        return
    cell = cause.cells[0]
    command = f"TORCH_LOGS={channels} pytest --compile-inprocess -s"
    # Ranks have processes of their own, whose output nobody sees: what torch logs goes to a file.
    if by_id[cell].lane == "ranks":
        command = f"TORCH_LOGS={channels} TORCH_LOGS_OUT=torch.log pytest"
    yield "- To see it:"
    for line in code_block(f"{command} --compile-matrix={matrix} '{matrix}::{cell}'"):
        yield f"  {line}" if line else ""


def _stage_to_blame(cause: Cause, by_id: Mapping[str, Facts]) -> str:
    """Where in the compiler, if a cell that differs in nothing but its backend holds the check."""
    # Graph breaks, recompiles and coverage are Dynamo's doing, whatever the backend.
    if cause.verdict == "fail" and COMPARING.isdisjoint(cause.checks) and "raised" not in cause.problem.message:
        return ""
    for cell in cause.cells:
        failing = by_id[cell]
        backend = failing.axes.get("backend", "")
        if not backend:
            continue
        # The nearest stage before it says most.
        for before in reversed(stages_before(backend)):
            sibling = _cell_with_backend(failing, before, by_id)
            if sibling is None or not all(_has_passed(sibling, check) for check in cause.checks):
                continue
            blame = f"what {inline_code(backend)} does after that"
            if _next_stage(before) == backend:
                blame = STAGES.get(backend, "the backend itself")
            return f"With backend {inline_code(before)} the same cell holds {evidence([sibling.id])}, so look at " \
                   f"{blame}."
    return ""


def _next_stage(backend: str) -> str:
    names = list(STAGES)
    return names[names.index(backend) + 1] if backend in names[:-1] else ""


def _cell_with_backend(cell: Facts, backend: str, by_id: Mapping[str, Facts]) -> Facts | None:
    """The cell with this backend and all other axes the same."""
    # The same cell but for its backend: what differs is the backend's doing.
    wanted = {**cell.axes, "backend": backend}
    for other in by_id.values():
        if other.axes == wanted:
            return other
    return None


def _has_passed(cell: Facts, check: str) -> bool:
    return any(each.check == check and each.verdict == "pass" for each in cell.verdicts)
