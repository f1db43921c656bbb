"""Outcome: what our checks said of one case, and what that means."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from pytest_torchcompile import checks
from pytest_torchcompile.cell import DYNAMIC, Cell
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.faults.case import Case
from pytest_torchcompile.faults.presence import Presence
from pytest_torchcompile.gauges import memory
from pytest_torchcompile.layer.config import CompileConfig
from pytest_torchcompile.layer.equivalence import compare
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.run.runner import run_cell
from pytest_torchcompile.run.subject import cxx_compiler
from pytest_torchcompile.state.torch_state import isolated

__all__ = ["GOOD", "Checked", "Outcome", "Report", "run_case"]

GOOD: Final = ("caught", "below noise", "silent", "mended", "unavailable")
"""The verdicts that are as they should be."""


@dataclass(frozen=True)
class Report:
    """One problem that a check reported."""

    kind: str
    where: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """The verdict on one case."""

    case: Case
    verdict: str
    """``caught`` (the right kind in the right place), ``missed``, ``below noise`` (silent, and proven to be no further
    from the exact result than eager), ``silent`` and ``false alarm`` (of correct ones), ``mended`` (a fault of torch's
    that this torch does not have), ``not planted`` (nothing differs: the record is at fault), ``failed`` (the check
    raised), ``unavailable``."""
    reports: tuple[Report, ...]
    text: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Is it as it should be?"""
        return self.verdict in GOOD

    def __str__(self) -> str:
        kind = self.case.kind or "correct"
        lines = [f"{self.verdict}: {self.case.name} ({kind}; {self.case.says})"]
        if self.text:
            lines.append(f"    {self.text}")
        for report in self.reports[:6]:
            lines.append(f"    reported: {report.kind} of {report.where}: {report.text}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Checked:
    """What a check made of a case."""

    reports: list[Report]
    noise: float = 0.0
    """The largest difference that was found, in units of rounding noise; 0 where compiled equals eager bit by bit."""


def run_case(case: Case) -> Outcome:
    """Run one case through the check that is there for it."""
    start = time.perf_counter()
    if case.inductor and case.program.device == "cpu" and cxx_compiler() is None:
        return Outcome(case, "unavailable", (), "no C++ compiler found; install g++ or clang")
    if case.program.cpu_only and case.program.device != "cpu":
        return Outcome(case, "unavailable", (), case.program.cpu_only)
    # A check that raises has caught nothing; the run goes on with the next case.
    reports: list[Report] = []
    try:
        checked = _CHECKS.get(case.check, _check_cell)(case)
        reports = checked.reports
        if case.kind:
            verdict, text = _judge_fault(case, reports)
        else:
            verdict, text = _judge_correct(case, checked)
    except Exception as error:
        verdict, text = "failed", f"the check itself raised {type(error).__name__}: {error}"
    return Outcome(case, verdict, tuple(reports), text, time.perf_counter() - start)


def _judge_fault(case: Case, reports: list[Report]) -> tuple[str, str]:
    """The verdict on a fault, and why."""
    if any("UsageError: the graph" in report.text for report in reports):
        return "not planted", "a pass did not find what it was to change"
    hits = [report.kind == case.kind and case.where in report.where for report in reports]
    if any(hits):
        if case.alone and not all(hits):
            return "false alarm", "beside the fault, right things too"
        return "caught", ""
    # What these are about no comparison of tensors shows, so that there is no second opinion to ask for.
    if case.check != "compare" or case.kind in ("vacuous", "nondeterministic"):
        return "missed", f"{case.check} reported nothing of kind {case.kind!r}"
    return _judge_silence(case, reports)


def _judge_silence(case: Case, reports: list[Report]) -> tuple[str, str]:
    """The verdict where the fault was not reported: it is missed, unless it is not there or excused."""
    # Asked only now: for each case it would take longer than the check itself.
    presence = Presence(case)
    if case.upstream and presence.largest_difference() < _MENDED:
        return "mended", f"this torch computes it right ({case.upstream})"
    differences = presence.differences()
    if case.kind != "error":
        differences.discard("error")
    if not differences:
        return "not planted", "eager and compiled are equal, bit by bit"
    if case.below and not reports and presence.is_rounding():
        return "below noise", case.below
    place = f" in {case.where!r}" if case.where else ""
    return "missed", f"expected a problem of kind {case.kind!r}{place}; what differs: {sorted(presence.differences())}"


_MENDED: Final = 0.05
"""A relative difference that no rounding explains, and that torch's own faults exceed many times."""


def _judge_correct(case: Case, checked: Checked) -> tuple[str, str]:
    if checked.reports:
        return "false alarm", ""
    if case.check == "compare" and not case.control and not checked.noise:
        return "not planted", "compiled is bitwise equal to eager, so that its silence proves nothing"
    return "silent", ""


def _check_by_compare(case: Case) -> Checked:
    config = CompileConfig(enabled=True, backend=case.backend(), dynamic=case.dynamic)
    comparison = compare(case.program.build_model(), case.program.make_calls(), config, steps=case.steps)
    reports = [Report(each.kind, each.where, f"{each.message} {each.evidence}") for each in comparison.problems]
    return Checked(reports, comparison.noise)


def _check_memory(case: Case) -> Checked:
    """Bytes that each further step leaves behind."""
    model, (batch,) = case.program.build_model(), case.program.make_calls()
    with isolated([]):
        compiled = torch.compile(model, backend=case.backend())

        def run_step() -> None:
            model.zero_grad()
            compiled(*batch.clone().args).square().mean().backward()

        growth = memory.memory_growth(run_step, case.program.device)
    if growth <= _LEAK:
        return Checked([])
    return Checked([Report("memory", "each step", f"leaves {growth / 2**20:.1f} MiB behind")])


_LEAK: Final = 2**19
"""Bytes; the leaks that are planted lose several times as much with each step."""
_KINDS: Final = {"graph_breaks": "graph_break", "recompiles": "recompile", "compiles": "vacuous"}


def _check_cell(case: Case) -> Checked:
    """As a cell of a matrix, in this process, judged by the check of that name."""
    program = case.program
    dims = {name: Dim(buckets=tuple(sizes[name] for sizes in program.sizes)) for name in program.sizes[0]}
    entry = ModelEntry("program", _path_of(program.model), _path_of(program.inputs), dims=dims)
    dynamic = next(name for name, value in DYNAMIC.items() if value is case.dynamic)
    cell = Cell(model="program", backend=case.backend(), dynamic=dynamic, device=program.device)
    # Running a cell puts the folder of its matrix onto the path.
    path = list(sys.path)
    try:
        seen, _ = run_cell(Job(cell.to_dict(), entry.to_dict(), str(Path.cwd()), (case.check,)))
    finally:
        sys.path[:] = path
    if failure := seen["failure"]:
        raise TorchcompileError(f"the cell did not run: {failure}")
    problems = checks.load(case.check).judge(seen["sections"][case.check], {})
    kind = _KINDS[case.check]
    return Checked([Report(kind, each.evidence or each.message, each.message) for each in problems])


def _path_of(function: Callable[..., object]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


_CHECKS: Final[dict[str, Callable[[Case], Checked]]] = {"compare": _check_by_compare, "memory": _check_memory}
