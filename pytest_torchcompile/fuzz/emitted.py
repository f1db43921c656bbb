"""From a failing sequence to a test of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pytest_torchcompile.fuzz.drawn_call import Sequence, code

if TYPE_CHECKING:
    from pytest_torchcompile.fuzz.sequence_run import Attempts
    from pytest_torchcompile.wrappers.cell_trial import CellTrial

__all__ = ["attempts_of", "emitted"]

_TEST = '''\
# test_{name}.py
from hypothesis import Phase, example, given, settings

from pytest_torchcompile import assert_calls, call, cell_sequences

MATRIX, CELL = {matrix!r}, {cell!r}


@settings(phases=[Phase.explicit], deadline=None)
@example(calls={calls})
@given(calls=cell_sequences(MATRIX, CELL))
def test_{name}(calls):
    assert_calls(MATRIX, CELL, calls)'''


def attempts_of(run: CellTrial) -> Attempts:
    """Attempts on the program of a cell."""
    from pytest_torchcompile.fuzz.sequence_run import Attempts

    return Attempts(run.make, run.pristine, run.settings, run.batch, run.loss, run.train, run.seed, run.unit, run.root,
                    run.job.limits)


def emitted(run: CellTrial, sequence: Sequence) -> str:
    """A pytest file that runs the sequence on the cell, and looks for others once its settings are removed."""
    name = re.sub(r"\W+", "_", run.cell.id).strip("_")
    return _TEST.format(name=name, matrix=run.matrix, cell=run.cell.id, calls=code(sequence))
