"""Mistakes of a matrix that one cell has found, and that every other cell of the model would find again.

A factory or an inputs function that raises does so in each cell that calls it alike: same arguments, device and dtype.
The first of these cells is run, and the others get its failure, so that one mistake costs the seconds of one.

That holds only for what was raised before the model ran, and once more when the function was called again alike
(:data:`~pytest_torchcompile.observation.RAISED_TWICE`). A check may ask for sizes that other cells never see, and a
function that reads a clock or a server raises now and then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Final

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.observation import RAISED_TWICE, Failure, Job, Observation

__all__ = ["KnownMistakes"]

_MAY_PASS: Final = re.compile(r"raised \w*(Memory|Connection|Timeout|HTTP|URL|OS|IO|Blocking)\w*(Error|Exception)?\b")
"""What may go away by itself: each cell tries it again."""


@dataclass
class KnownMistakes:
    """What was found so far in a run."""

    _found: dict[Hashable, tuple[str, Failure]] = field(default_factory=dict)
    """By what the user's functions are called with: the cell that found it, and its failure."""

    def note(self, cell: Cell, job: Job, observation: Observation) -> None:
        """Remember the mistake of a cell, if it is one of the user's functions."""
        failure = observation.failure
        if failure is None or failure.kind != "usage" or _MAY_PASS.search(failure.message):
            return
        # A cell whose model has run has seconds of it.
        if failure.phase != RAISED_TWICE or observation.seconds:
            return
        self._found.setdefault(_given_to_functions(cell, job), (cell.id, failure))

    def observation_of(self, cell: Cell, job: Job) -> Observation | None:
        """What there is to say of a cell that need not be run; None where it has to be."""
        found = self._found.get(_given_to_functions(cell, job))
        if found is None:
            return None
        first, failure = found
        why = f"this cell was not run: its factory and inputs are called as those of {first}, which found it"
        return Observation(cell.id, failure=replace(failure, evidence=why))


def _given_to_functions(cell: Cell, job: Job) -> Hashable:
    entry = json.dumps(job.entry, sort_keys=True, default=str)
    return entry, cell.user, cell.device, cell.dtype, cell.phase, cell.wrapper
