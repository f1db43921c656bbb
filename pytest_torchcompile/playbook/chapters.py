"""The whole playbook as Markdown, and its command. Each sentence about a model is followed by the cells it rests on."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence

from pytest_torchcompile.errors import NothingToJudge
from pytest_torchcompile.gate.announcement import run_facts, sentence
from pytest_torchcompile.gate.gate import GateOutcome, gate
from pytest_torchcompile.gate.markdown import inline_code
from pytest_torchcompile.gate.policyfile import read_policy
from pytest_torchcompile.playbook.choice import choices, has_verdict, settings_by_model
from pytest_torchcompile.playbook.gotchas import gotchas
from pytest_torchcompile.playbook.practice import cache_notes, shape_notes, warm_up_notes
from pytest_torchcompile.playbook.prose import evidence, prose
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.files import write_output
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.report.reading import read_report

__all__ = ["playbook", "run_command"]


def run_command(given: argparse.Namespace) -> int:
    """The command ``pytest-torchcompile playbook``: read reports, write the playbook; ``-`` is the terminal.

    :raises ReportError: the reports cannot be read, or are not of one run.
    :raises NothingToJudge: no cell ran, so there is nothing that a playbook could say.
    """
    policy = None if given.policy is None else read_policy(given.policy)
    outcome = gate(list(map(read_report, given.reports)), policy)
    if not any(map(has_verdict, outcome.facts)):
        raise NothingToJudge(f"{', '.join(given.reports)}: no cell ran, so there is nothing to write a playbook of; "
                             f"{sentence(outcome)}")
    if given.output == "-":
        print(playbook(outcome), end="")
    else:
        write_output(given.output, playbook(outcome), force=given.force)
        print(given.output, "written")
    return 0


def playbook(outcome: GateOutcome) -> str:
    """The playbook of a run."""
    run, cells = outcome.merged, outcome.facts
    matrix = run.matrix["path"]
    by_model = settings_by_model(cells)
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
    lines += ["", "## Gotchas", "", *gotchas(list(filter(has_verdict, cells)), matrix)]
    lines += ["", "## Warm-up", "", *warm_up_notes(by_model)]
    lines += ["", "## Caches", "", *cache_notes(cells)]
    lines += ["", "## Sizes and buckets", "", *shape_notes(by_model)]
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
