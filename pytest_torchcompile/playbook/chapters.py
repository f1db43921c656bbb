"""The whole playbook as Markdown, and its command. Each sentence about a model is followed by the cells it rests on.

The chapter on gotchas is here too: what the report found wrong, at which line, in which stage of the compiler, and how
to see it oneself.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pytest_torchcompile.checks import CHECKS, COMPARING
from pytest_torchcompile.errors import NothingToJudge
from pytest_torchcompile.gate.announcement import run_facts, sentence
from pytest_torchcompile.gate.gate import GateOutcome, gate
from pytest_torchcompile.gate.markdown import code_block, evidence, inline_code, prose
from pytest_torchcompile.gate.permitted import permitted_causes
from pytest_torchcompile.gate.policyfile import read_policy
from pytest_torchcompile.layer.shape_ways import ShapeExperiment
from pytest_torchcompile.oracle.diagnosis import STAGES, stages_before
from pytest_torchcompile.playbook.choice import choices, has_verdict, settings_by_model
from pytest_torchcompile.playbook.playbook_record import GOTCHA_VERDICTS, playbook_record
from pytest_torchcompile.playbook.practice import cache_notes, shape_notes, warm_up_notes
from pytest_torchcompile.playbook.shape_notes import experiment_notes, read_experiment
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.causes import Cause, group_causes
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.report.reading import read_report
from pytest_torchcompile.report.safe_output import write_output

__all__ = ["KNOBS", "gotchas", "playbook", "run_command"]


def run_command(given: argparse.Namespace) -> int:
    """The command ``pytest-torchcompile playbook``: read reports, write the playbook; ``-`` is the terminal.

    :raises ReportError: the reports cannot be read, or are not of one run.
    :raises NothingToJudge: no cell ran, so there is nothing that a playbook could say.
    """
    policy = None if given.policy is None else read_policy(given.policy)
    outcome = gate(list(map(read_report, given.reports)), policy)
    # Refused rather than written: a document without a finding would read as if all were well.
    if not any(map(has_verdict, outcome.facts)):
        raise NothingToJudge(f"{', '.join(given.reports)}: no cell ran, so there is nothing to write a playbook of; "
                             f"{sentence(outcome)}")
    if given.json:
        print(json.dumps(playbook_record(outcome), indent=1))
        return 0
    text = playbook(outcome, list(map(read_experiment, given.shapes)))
    if given.output == "-":
        print(text, end="")
    else:
        write_output(given.output, text, force=given.force)
        print(given.output, "written")
    return 0


def playbook(outcome: GateOutcome, experiments: Sequence[ShapeExperiment] = ()) -> str:
    """The playbook of a run, with what the command `shapes` has found of its models."""
    run, cells = outcome.merged, outcome.facts
    matrix = run.matrix["path"]
    by_model = settings_by_model(cells)
    permitted = permitted_causes(run.cells.values(), outcome.cells)
    command = f"pytest --compile-matrix={matrix} && pytest-torchcompile playbook .compile-matrix/report.json"
    lines = [
        "# Compiling these models with torch.compile", "",
        f"Made by `pytest-torchcompile playbook` out of {prose(run_facts(outcome))}. Every sentence comes from that "
        "report, and the cells in brackets are its evidence. Make it anew after a change: "
        f"{inline_code(command)}.", "",
    ]
    for problem in run.problems:
        lines.append(f"> This is not the whole run: {prose(problem)}.")
    lines += ["", "## What to use", "", *(choices(by_model) or ["No cell ran."])]
    lines += ["", "## Gotchas", "", *gotchas(list(filter(has_verdict, cells)), matrix, permitted)]
    lines += ["", "## Warm-up", "", *warm_up_notes(by_model)]
    lines += ["", "## Caches", "", *cache_notes(cells)]
    lines += ["", "## Sizes and buckets", "", *shape_notes(by_model)]
    lines += experiment_notes(experiments)
    lines += ["", "## What this report does not tell", "", *_what_is_unknown(run, cells)]
    # Chapters end in an empty line or do not; one between them is enough.
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _what_is_unknown(run: Merged, cells: Sequence[Facts]) -> Iterator[str]:
    skipped: dict[str, list[str]] = {}
    for cell in cells:
        if cell.status == "skip":
            skipped.setdefault(cell.note, []).append(cell.id)
    # The most frequent reason first; equals stay in the order of the report.
    for reason in sorted(skipped, key=lambda each: -len(skipped[each])):
        yield f"- {count(len(skipped[reason]), 'cell')} skipped: {prose(reason) or 'no reason told'} " \
              f"{evidence(skipped[reason])}"
    excluded: dict[str, int] = run.matrix["excluded"]
    for reason, number in excluded.items():
        yield f"- {count(number, 'combination')} left out by the matrix: {prose(reason)}"
    judged = list(filter(has_verdict, cells))
    for axis in ("device", "dtype", "phase"):
        values = {cell.axes.get(axis, "") for cell in judged}
        # Where two values were tried the reader sees them in the cells.
        if len(values) == 1 and values != {""}:
            yield f"- {axis}: only {inline_code(*values)} was tried"
    if not any("kernels" in cell.sections for cell in cells):
        yield "- generated kernels: not recorded"


# ----------------------------------------------------------------------------------------------- the chapter on gotchas
TITLE: Final = 100
_ALLOWED: Final = " (allowed: limits of the matrix let it pass)"
"""How it is said of a cause that no check complains of it."""
KNOBS: Final[dict[str, str]] = {name: check.logs for name, check in CHECKS.items() if check.logs} | {
    "crash": "+dynamo,aot_graphs,output_code",
    "timeout": "+dynamo,output_code",
}
"""Check (or verdict, where the cell had no end) to the channels of ``TORCH_LOGS`` that show it."""


def gotchas(cells: Sequence[Facts], matrix: str, permitted: Sequence[Cause] = ()) -> list[str]:
    """A paragraph for each cause, the worst first; those behind that limits of the matrix let pass (``permitted``)."""
    causes = group_causes(cells, GOTCHA_VERDICTS)
    if not causes and not permitted:
        return ["None: every check holds in every cell that ran.", ""]
    by_id = {cell.id: cell for cell in cells}
    lines: list[str] = []
    for number, cause in enumerate((*causes, *permitted), 1):
        known = ""
        if cause.verdict == "xfail":
            known = " (known: a rule of the matrix expects it)"
        elif number > len(causes):
            known = _ALLOWED
        lines += _paragraph(number, cause, by_id, known)
        lines += _how_to_see(cause, by_id, matrix)
    return lines


def _paragraph(number: int, cause: Cause, by_id: Mapping[str, Facts], known: str) -> Iterator[str]:
    problem = cause.problem
    title = inline_code(problem.place) if problem.place else cause.name
    short = textwrap.shorten(problem.message, TITLE, placeholder=" ...")
    yield f"### {number}. {title}: {prose(short)}"
    yield ""
    where = f"In {count(len(cause.cells), 'cell')} {evidence(cause.cells)}{known}"
    # A title that had to be cut is followed by the whole message.
    yield f"{where}." if short == problem.message else f"{where}. {prose(problem.message)}"
    yield ""
    for line in cause.further_lines():
        yield f"- {prose(line)}"
    # What is allowed already needs no advice to allow it.
    if problem.hint and known != _ALLOWED:
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
