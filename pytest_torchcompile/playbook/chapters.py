"""Document: the whole playbook as Markdown. Each sentence about a model is followed by the cells it rests on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_torchcompile.gate.announcement import run_facts
from pytest_torchcompile.gate.gate import GateOutcome
from pytest_torchcompile.gate.markdown import inline_code as code
from pytest_torchcompile.playbook.choice import choices, ran, settings
from pytest_torchcompile.playbook.gotchas import gotchas
from pytest_torchcompile.playbook.practice import caches, shapes, warm_up
from pytest_torchcompile.playbook.prose import evidence, prose
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.merging import Merged

__all__ = ["playbook"]


def playbook(outcome: GateOutcome) -> str:
    """The playbook of a run."""
    run, cells = outcome.merged, outcome.facts
    matrix = run.matrix["path"]
    by_model = settings(cells)
    lines = [
        "# Compiling these models with torch.compile", "",
        f"Made by `pytest-torchcompile playbook` out of {prose(run_facts(outcome))}. Every sentence comes from that "
        "report, and the cells in brackets are its evidence. Make it anew after a change: "
        f"{code(f'pytest --compile-matrix={matrix} && pytest-torchcompile playbook .compile-matrix/report.json')}.", "",
        *(f"> This is not the whole run: {prose(problem)}." for problem in run.problems), *[""] * bool(run.problems),
        "## What to use", "", *(choices(by_model) if by_model else ["No cell ran.", ""]),
        "## Gotchas", "", *gotchas([cell for cell in cells if ran(cell)], matrix),
        "## Warm-up", "", *warm_up(by_model),
        "## Caches", "", *caches(cells),
        "## Sizes and buckets", "", *shapes(by_model),
        "## What this report does not tell", "", *_unknown(run, cells), "",
    ]  # fmt: skip
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _unknown(run: Merged, cells: Sequence[Facts]) -> Iterator[str]:
    skipped = Counter(cell.note for cell in cells if cell.status == "skip")
    for reason, number in skipped.most_common():
        yield f"- {count(number, 'cell')} skipped: {prose(reason) or 'no reason told'} " \
              f"{evidence(c.id for c in cells if c.status == 'skip' and c.note == reason)}"
    excluded: dict[str, int] = run.matrix["excluded"]
    for reason, number in excluded.items():
        yield f"- {count(number, 'combination')} left out by the matrix: {prose(reason)}"
    for axis in ("device", "dtype", "phase"):
        values = list(dict.fromkeys(cell.axes.get(axis, "") for cell in cells if ran(cell)))
        if len(values) == 1 and values[0]:
            yield f"- {axis}: only {code(values[0])} was tried"
    if not any("kernels" in cell.sections for cell in cells):
        yield "- generated kernels: not recorded"
