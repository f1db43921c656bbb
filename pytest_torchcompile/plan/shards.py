"""Shards: a matrix cut into parts that take about as long, for as many machines."""

from __future__ import annotations

import hashlib
import heapq
import re
from collections.abc import Sequence
from typing import Final

from pytest_torchcompile.backends import BACKENDS
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.plan.expansion import PlannedCell

__all__ = ["cells_of_shard", "estimated_seconds", "parse_shard"]

MOST: Final = 9999
_KERNELS: Final = 8.0
_AUTOTUNED: Final = 4.0
"""Rough seconds of a cold cell on CPU: generated kernels must be built, autotuned ones several times."""


def parse_shard(text: str) -> tuple[int, int]:
    """Read ``2/8`` as (2, 8). Raises :class:`UsageError` for anything that is no part of a whole."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
    if match is None:
        raise UsageError(f"shard {text!r} is not a part of a whole; expected I/N, for example 2/8")
    index, of = int(match[1]), int(match[2])
    if not 1 <= of <= MOST:
        raise UsageError(f"shard {text!r}: cannot cut into {of} parts; expected 1 to {MOST}")
    if not 1 <= index <= of:
        raise UsageError(f"shard {text!r}: there is no part {index} of {of}; expected 1/{of} to {of}/{of}")
    return index, of


def cells_of_shard(cells: Sequence[PlannedCell], index: int, of: int) -> tuple[PlannedCell, ...]:
    """Return part ``index`` (from 1) of ``of``, in the order of ``cells``.

    Every cell is in exactly one part, the same whatever the order of ``cells``. The dearest cell goes first,
    each to the part that has least to do; equally dear cells of one model and dynamic are dealt in turn.
    """
    # A heap: what each part has to do.
    loads = [(0.0, part) for part in range(1, of + 1)]
    mine = set()
    for planned in sorted(cells, key=_dearest_first):
        load, part = loads[0]
        heapq.heapreplace(loads, (load + estimated_seconds(planned), part))
        if part == index:
            mine.add(planned.cell.id)
    return tuple(planned for planned in cells if planned.cell.id in mine)


def estimated_seconds(planned: PlannedCell) -> float:
    """Return about how long the cell takes, in seconds of a machine that has compiled nothing yet."""
    cell = planned.cell
    if planned.outcome == "skip":
        return 0.01
    seconds = 1.0
    backend = BACKENDS.get(cell.backend)
    # A backend that is not in the table may well generate kernels.
    if backend is None or backend.kernels:
        autotuned = "max-autotune" in cell.mode
        seconds += _KERNELS * _AUTOTUNED if autotuned else _KERNELS
    # Compiled static first, then once more for changed shapes.
    if cell.dynamic == "auto":
        seconds *= 1.5
    if cell.phase == "training":
        seconds *= 2.0
    return seconds


def _dearest_first(planned: PlannedCell) -> tuple[float, str, str, bytes]:
    # By hash at last: cells that cost the same are spread over the shards, whatever the order of the file.
    cell: Cell = planned.cell
    return -estimated_seconds(planned), cell.model, cell.dynamic, hashlib.sha256(cell.id.encode()).digest()
