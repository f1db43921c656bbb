"""The command ``pytest-torchcompile cells``: what a matrix expands to, and what its cells need of a machine."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.plan.matrix import Excluded, Matrix, PlannedCell, load_matrix
from pytest_torchcompile.plan.selection import cells_of_shard
from pytest_torchcompile.quantity import count, listed_counts
from pytest_torchcompile.ranks.execution import gpus_of
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["print_cells"]


def print_cells(path: Path, shard: tuple[int, int], *, as_json: bool) -> int:
    """Print the cells of one shard, as a table or as a JSON list that has the excluded ones too. Returns 0."""
    try:
        matrix = load_matrix(path)
    except UsageError as error:
        # pytest has its own way to find modules.
        if "no module" in str(error):
            print("pytest's setting `pythonpath` is not read here: PYTHONPATH=src finds modules in src",
                  file=sys.stderr)
        raise
    planned = cells_of_shard(matrix.cells, *shard)
    if as_json:
        records = list(map(_record_of, planned))
        # Excluded cells are no shard's.
        if shard[1] == 1:
            records += map(_record_of, matrix.excluded)
        print(json.dumps(records, indent=1))
        return 0
    for line in (*_table_lines(planned), *_total_lines(matrix, planned)):
        print(line)
    return 0


def _record_of(cell: PlannedCell | Excluded) -> dict[str, Any]:
    """A cell as the JSON list has it; what only planned cells have is empty for excluded ones."""
    return {
        "id": cell.cell.id,
        "axes": cell.cell.axes,
        # Excluded cells have no outcome: they are in the list because a reader asks where they went.
        "outcome": getattr(cell, "outcome", "exclude"),
        "reason": cell.reason,
        "issue": cell.issue,
        "until": getattr(cell, "until", ""),
        "checks": list(getattr(cell, "checks", ())),
        "also": list(getattr(cell, "also", ())),
        "rule": cell.rule,
        "limits": getattr(cell, "limits", {}),
    }


def _table_lines(cells: Sequence[PlannedCell]) -> Iterator[str]:
    # No cells at all is an answer too: a selection may leave none.
    width = max((len(planned.cell.id) for planned in cells), default=0)
    for planned in cells:
        details = [planned.issue]
        if planned.until:
            details.append(f"until {planned.until}")
        details += planned.checks
        if planned.also:
            details.append(f"also {', '.join(planned.also)}")
        details.append(_needs_text(planned))
        why = planned.reason
        if any(details):
            why = f"{why} ({'; '.join(filter(None, details))})".lstrip()
        yield f"{planned.cell.id:{width}}  {planned.outcome:5}  {why}".rstrip()


def _needs_text(planned: PlannedCell) -> str:
    """What a cell needs more of than most do."""
    gpus = gpus_of(planned.cell)
    if gpus > 1:
        return f"needs {gpus} GPUs"
    ranks = Wrapping.read(planned.cell.wrapper).processes
    if ranks > 1:
        return f"needs {ranks} processes"
    return ""


def _total_lines(matrix: Matrix, cells: Sequence[PlannedCell]) -> Iterator[str]:
    part = f" (of {len(matrix.cells)})" if len(cells) < len(matrix.cells) else ""
    outcomes = Counter(planned.outcome for planned in cells)
    counts = listed_counts(dict(outcomes.most_common()))
    yield f"{count(len(cells), 'cell')}{part}: {counts or 'none'}"
    if matrix.left_out:
        yield f"{matrix.left_out} more are left out by the strategy: {matrix.strategy}"
    excluded = Counter((cell.rule, cell.reason) for cell in matrix.excluded)
    # By the line of the rule in the file.
    for rule, reason in sorted(excluded, key=lambda key: int(key[0].rpartition(":")[2])):
        yield f"{excluded[rule, reason]} excluded by {rule}: {reason}"
    for note in (*matrix.notes, *_crowd_notes(cells)):
        yield f"note: {note}"


_FEW: Final = 8
"""Processes of a cell that are nothing to speak of, on any machine."""


def _crowd_notes(cells: Sequence[PlannedCell]) -> Iterator[str]:
    """Ranks on the CPU share the cores of the machine, however many: such cells run, and take their time."""
    cores = os.cpu_count() or 1
    crowds = []
    for planned in cells:
        ranks = Wrapping.read(planned.cell.wrapper).processes
        on_cpu = not planned.cell.device.startswith("cuda")
        if on_cpu and planned.outcome != "skip" and ranks > max(cores, _FEW):
            crowds.append(ranks)
    if crowds:
        yield (f"{count(len(crowds), 'cell runs', 'cells run')} up to {max(crowds)} processes at once, each with "
               f"torch in it, and this machine has {count(cores, 'core')}")
