"""Gotchas: what the report found wrong, at which line, in which stage of the compiler, and how to see it oneself."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pytest_torchcompile.checks import CHECKS, COMPARING
from pytest_torchcompile.gate.markdown import code_block
from pytest_torchcompile.gate.markdown import inline_code as code
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
    at = {cell.id: cell for cell in cells}
    found = group_causes(cells, VERDICTS)
    if not found:
        return ["None: every check holds in every cell that ran.", ""]
    return [line for number, cause in enumerate(found, 1) for line in _gotcha(number, cause, at, matrix)]


def _gotcha(number: int, cause: Cause, at: Mapping[str, Facts], matrix: str) -> Iterator[str]:
    problem, check = cause.problem, cause.checks[0]
    title = code(problem.place) if problem.place else ", ".join(cause.checks)
    known = " (known: a rule of the matrix expects it)" if cause.verdict == "xfail" else ""
    short = textwrap.shorten(problem.message, TITLE, placeholder=" ...")
    yield f"### {number}. {title}: {prose(short)}"
    yield ""
    whole = "" if short == problem.message else f" {prose(problem.message)}"
    yield f"In {count(len(cause.cells), 'cell')} {evidence(cause.cells)}{known}.{whole}"
    yield ""
    for line in cause.further_lines():
        yield f"- {prose(line)}"
    if problem.hint:
        yield f"- Try: {prose(problem.hint)}"
    if stage := _stage(cause, at):
        yield f"- {stage}"
    channels = KNOBS.get(check if cause.verdict in ("fail", "xfail", "xpass") else cause.verdict)
    if channels:
        yield "- To see it:"
        cell = cause.cells[0]
        # Ranks have processes of their own, whose output nobody sees: what torch logs goes to a file.
        how = f"TORCH_LOGS={channels} TORCH_LOGS_OUT=torch.log pytest" if at[cell].lane == "ranks" else \
              f"TORCH_LOGS={channels} pytest --compile-inprocess -s"
        command = f"{how} --compile-matrix={matrix} '{matrix}::{cell}'"
        yield from ("  " + line if line else line for line in code_block(command))
    else:
        yield ""


def _stage(cause: Cause, at: Mapping[str, Facts]) -> str:
    """Where in the compiler, if a cell that differs in nothing but its backend holds the check.

    Graph breaks, recompiles and coverage are Dynamo's doing, whatever the backend.
    """
    if cause.verdict == "fail" and COMPARING.isdisjoint(cause.checks) and "raised" not in cause.problem.message:
        return ""
    for failing in (at[cell] for cell in cause.cells):
        backend = failing.axes.get("backend", "")
        for before in reversed(stages_before(backend)) if backend else ():
            twin = _twin(failing, before, at)
            if twin is not None and all(_held(twin, check) for check in cause.checks):
                blame = STAGES.get(backend, "the backend itself")
                return f"With backend {code(before)} the same cell holds {evidence([twin.id])}, so look at " \
                       f"{blame if _next(before) == backend else f'what {code(backend)} does after that'}."
    return ""


def _next(backend: str) -> str:
    names = list(STAGES)
    return names[names.index(backend) + 1] if backend in names[:-1] else ""


def _twin(cell: Facts, backend: str, at: Mapping[str, Facts]) -> Facts | None:
    """The cell with this backend and all other axes the same."""
    wanted = {**cell.axes, "backend": backend}
    return next((other for other in at.values() if other.axes == wanted), None)


def _held(cell: Facts, check: str) -> bool:
    return any(v.check == check and v.verdict == "pass" for v in cell.verdicts)


