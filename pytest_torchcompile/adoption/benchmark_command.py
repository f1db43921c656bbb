"""The command ``pytest-torchcompile benchmark``: one model, each mode of torch.compile, timed beside eager.

Each mode is a cell of its own, run as a matrix run would, with the checks `compiles`, `equivalence` and `worth`. Each
runs in processes with empty caches of their own and a warm compiler, so that seconds of compiling can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pytest_torchcompile.adoption.chosen_cell import chosen_cell
from pytest_torchcompile.backends import BACKENDS
from pytest_torchcompile.checks.slow_causes import idle_remark, slow_cause
from pytest_torchcompile.empty_caches import empty_caches
from pytest_torchcompile.gate.markdown import inline_code, prose, table
from pytest_torchcompile.layer.benchmark_result import NOT_TOLD, NOTHING
from pytest_torchcompile.observation import Judgement
from pytest_torchcompile.plan.expansion import PlannedCell
from pytest_torchcompile.plan.matrix import Matrix
from pytest_torchcompile.quantity import readable_seconds
from pytest_torchcompile.ranks.execution import CellResult, Execution
from pytest_torchcompile.ranks.serving import set_environment
from pytest_torchcompile.ranks.starting import open_processes
from pytest_torchcompile.run.settings import Settings

__all__ = ["ModeReport", "report_lines", "report_markdown", "run_command"]

MODES: Final = ("default", "reduce-overhead", "max-autotune")
CHECKS: Final = ("compiles", "equivalence", "worth")
_HEAD: Final = ("mode", "verdict", "times as fast", "eager", "compiled", "a second", "kernels", "memory", "compiling",
                "pays after")
_MEASURE: Final = ("Seconds and items a second are those of a step in a quiet moment (the tenth percentile of all that "
                   "were timed); times as fast is the median over rounds, with its interval of 99 %.")


@dataclass(frozen=True)
class ModeReport:
    """What came of one mode."""

    cell: str
    mode: str
    verdict: str
    """``faster``, ``no difference``, ``slower``, ``could not be told``; else why there is no timing."""
    problems: tuple[str, ...]
    """What the checks found, wrong numbers before slowness."""
    worth: Mapping[str, Any]
    """The section of the check `worth`; empty if it was not measured."""
    cold_compiler: str = ""
    """Why the compiler was not warm when the cell began; empty where it was."""

    @classmethod
    def of(cls, mode: str, cell: str, result: CellResult) -> ModeReport:
        """The report of a cell that was run."""
        section = result.observation.sections.get("worth", {})
        problems = tuple(_problems(result.judgements))
        cold = result.observation.sections.get("compiles", {}).get("cold_compiler", "")
        if "interval" in section:
            return cls(cell, mode, section["verdict"], problems, section, cold)
        why = problems[0] if problems else result.judgements["worth"].note
        return cls(cell, mode, f"no timing: {why}", problems, {}, cold)

    def row(self) -> tuple[str, ...]:
        """The figures, in the order of the table's head."""
        if not self.worth:
            return (self.mode, self.verdict, *("-" for _ in _HEAD[2:]))
        worth, sides = self.worth, self.worth["sides"]
        low, high = worth["interval"]
        compiling = readable_seconds(worth["compiling_seconds"])
        if worth["cached"]:
            compiling += f" ({worth['cached']} of {worth['compiles']} from a cache)"
        kernels = f"{_number(sides['eager']['kernels'])} to {_number(sides['compiled']['kernels'])}"
        # Of the same quiet step as its time: the observation has items a second of the median.
        compiled = sides["compiled"]
        rate = compiled["items_per_second"] * compiled["median"] / compiled["low"]
        return (self.mode, self.verdict, f"{worth['speedup']:.2f} ({low:.2f} to {high:.2f})",
                f"{sides['eager']['low'] * 1e3:.3f} ms", f"{compiled['low'] * 1e3:.3f} ms",
                f"{rate:.4g} {worth['unit']}", kernels, f"{worth['memory_delta_mib']:+.1f} MiB", compiling, self._pays)

    @property
    def _pays(self) -> str:
        """When compiling pays: after some steps, never, or nobody can tell, as where the interval holds 1."""
        if self.verdict == NOTHING:
            return "-"
        if self.worth["pays_after"]:
            return f"{self.worth['pays_after']} steps"
        return "never" if self.worth["interval"][1] < 1 else "not told"

    @property
    def cause(self) -> str:
        """Why it is not faster; empty where it is, or nobody knows."""
        return slow_cause(self.worth) if self.worth else ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"cell": self.cell, "mode": self.mode, "verdict": self.verdict, "problems": list(self.problems),
                "cause": self.cause, "cold_compiler": self.cold_compiler, "worth": dict(self.worth)}


def _number(count: int | None) -> str:
    return "-" if count is None else str(count)


def _problems(judgements: Mapping[str, Judgement]) -> Iterator[str]:
    for name, judgement in judgements.items():
        for problem in judgement.problems:
            yield f"{name}: {problem.message}"


def run_command(given: argparse.Namespace) -> int:
    """Run the modes and print the report; returns 0, or 1 where a mode has no timing, as with wrong numbers.

    Raises :class:`UsageError` for a model or a cell that is not there.
    """
    matrix, planned = chosen_cell(given)
    reports = _run_modes(matrix, planned)
    if given.json:
        print(json.dumps({"model": planned.cell.model, "modes": [report.to_dict() for report in reports]}, indent=1))
    else:
        lines = report_markdown if given.markdown else report_lines
        for line in lines(planned.cell.model, reports, planned.cell.backend):
            print(line)
    return 0 if all(report.worth for report in reports) else 1


def _run_modes(matrix: Matrix, planned: PlannedCell) -> list[ModeReport]:
    set_environment()
    reports = []
    for mode in _modes_of(planned.cell.backend):
        # What the matrix allows of the cell is not asked here: the figures are what is wanted.
        each = PlannedCell(replace(planned.cell, mode=mode))
        reports.append(ModeReport.of(mode, each.cell.id, _result_apart(matrix, each)))
    return reports


def _result_apart(matrix: Matrix, planned: PlannedCell) -> CellResult:
    """The result of a cell in processes of its own with empty caches: what an earlier one compiled would serve it."""
    with empty_caches() as caches, _variables_set(caches):
        processes = open_processes()
        execution = Execution(matrix, Settings.read(lambda option: option.default), processes.folder,
                              warm_toolchain=True)
        try:
            return execution.cell_result(planned, CHECKS, CHECKS)
        finally:
            execution.close()
            processes.close()


@contextlib.contextmanager
def _variables_set(values: Mapping[str, str]) -> Iterator[None]:
    """The environment with these variables, for processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _modes_of(backend: str) -> tuple[str, ...]:
    """The modes that change something."""
    record = BACKENDS.get(backend)
    if record is not None and record.modes:
        return MODES
    return MODES[:1]


def report_lines(model: str, reports: Sequence[ModeReport], backend: str = "inductor") -> Iterator[str]:
    """The report for a terminal."""
    yield f"{model}: eager beside compiled. {_MEASURE}"
    rows = [_HEAD, *(report.row() for report in reports)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    yield from _reasons(reports)
    yield _advice(reports, backend)


def _reasons(reports: Sequence[ModeReport]) -> Iterator[str]:
    """Why a mode is not faster, where that is known; and what makes its seconds those of another case."""
    for report in reports:
        if report.cause:
            yield f"{report.mode}: {report.cause}"
        elif remark := idle_remark(report.worth) if report.worth else "":
            yield f"{report.mode}: {remark}"
        if load := report.worth.get("others_load"):
            yield f"{report.mode}: while it was timed {load}, so its seconds are too long"
        if report.cold_compiler:
            yield (f"{report.mode}: its compiler could not be warmed up before ({report.cold_compiler}), so what is "
                   "paid once on a machine is in its seconds of compiling")


def report_markdown(model: str, reports: Sequence[ModeReport], backend: str = "inductor") -> Iterator[str]:
    """The report as Markdown."""
    yield f"## {inline_code(model)}, eager beside compiled"
    yield ""
    yield prose(_MEASURE)
    yield ""
    yield from table(_HEAD, [tuple(map(prose, report.row())) for report in reports])
    for reason in _reasons(reports):
        yield f"- {prose(reason)}"
    yield prose(_advice(reports, backend))


def _advice(reports: Sequence[ModeReport], backend: str) -> str:
    """What to do, in one sentence or two."""
    record = BACKENDS.get(backend)
    # Of a backend that nobody has described to us, nothing is known.
    if record is not None and record.is_stage:
        return f"Backend {backend} is no optimiser: its time says nothing of what compiling brings. Time a cell of " \
               "inductor instead."
    faster = [report for report in reports if report.verdict == "faster"]
    if faster:
        fastest = max(faster, key=_speedup_of)
        # The first mode that may be as fast: the modes come with the simplest first.
        best = next(report for report in faster if report.worth["interval"][1] >= fastest.worth["interval"][0])
        return f"Use mode {best.mode}: {_speedup_of(best):.2f} times as fast as eager."
    if not any(report.worth for report in reports):
        return "No mode could be timed."
    not_compiled = [report.mode for report in reports if report.verdict == NOTHING]
    if len(not_compiled) == len(reports):
        return "Nothing is to be won like this: what was timed did not run compiled."
    untold = [report.mode for report in reports if report.verdict == NOT_TOLD]
    told = [report for report in reports if report.worth and report.verdict not in (NOTHING, NOT_TOLD)]
    if not told and not not_compiled:
        return "Nothing can be told: this machine is too busy to time anything; run it again when it is quiet."
    sentences = [_told_advice(told, reports)] if told else []
    if untold:
        sentences.append(f"Nothing can be told of {' and '.join(untold)}: this machine was too busy; run it again when "
                         "it is quiet.")
    if not_compiled:
        sentences.append(f"Nothing that was timed of {' and '.join(not_compiled)} ran compiled.")
    return " ".join(sentences)


def _told_advice(told: Sequence[ModeReport], reports: Sequence[ModeReport]) -> str:
    """What to do of modes none of which is faster."""
    slower = all(report.verdict == "slower" for report in told)
    if len(told) == len(reports):
        if slower:
            return "Do not compile this: eager is faster in every mode."
        return "No mode is faster than eager."
    names = " and ".join(report.mode for report in told)
    if slower:
        return f"Do not compile this by {names}: eager is faster."
    return f"Not faster than eager: {names}."


def _speedup_of(report: ModeReport) -> float:
    return float(report.worth["speedup"])
