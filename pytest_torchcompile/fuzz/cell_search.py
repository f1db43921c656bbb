"""The search in a cell: what depends on shapes alone is found with a cheap backend, everything else with the real one.

What it finds is written down as a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.dims import Dims
from pytest_torchcompile.fuzz.drawing import shape_sequences, sweep
from pytest_torchcompile.fuzz.drawn_call import Sequence, as_code
from pytest_torchcompile.fuzz.search import Budget, Examined, Result, search

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase

    from pytest_torchcompile.fuzz.sequence_run import Attempts
    from pytest_torchcompile.wrappers.cell_trial import CellTrial

__all__ = ["CHEAP", "attempts_of", "climb", "write_test"]

CHEAP = "eager"
"""The backend of the first rung: capture and guards, without AOTAutograd and without generated code."""


def climb(attempts: Attempts, dims: Dims, budget: Budget, *, max_calls: int = 6, flips: bool = False,
          others: Iterable[int] = (), seed: int = 0, database: ExampleDatabase | None = None,
          key: str = "") -> list[tuple[str, Result]]:
    """Search with CHEAP for half of the budget, then with the real backend. Returns each backend and what came of it.

    A sequence counts only if it fails with the real backend too: what the cheap one finds is tried there, every time
    that it is made smaller. A program whose backend is CHEAP has one rung.
    """
    real = attempts.settings["backend"]
    others = set(others)
    strategy = shape_sequences(dims, max_calls, flips=flips, others=others)
    first = sweep(dims, max_calls, others=others)
    if real == CHEAP:
        only = search(strategy, dims, attempts, budget, seed=seed, database=database, key=key, first=first)
        return [(CHEAP, only)]
    # Half of the sequences, and half of the share of time in which new ones are drawn.
    half = replace(budget, examples=max(1, budget.examples // 2), drawing=budget.drawing / 2)
    cheap = search(strategy, dims, _Confirmed(attempts.with_backend(CHEAP), attempts), half, seed=seed, first=first)
    if cheap.finding is not None:
        return [(CHEAP, cheap)]
    rest = replace(budget, seconds=max(0.0, budget.seconds - cheap.seconds),
                   compiles=max(0, budget.compiles - cheap.compiles))
    # Another seed: other sequences than those that held on the first rung.
    last = search(strategy, dims, attempts, rest, seed=seed + 1, database=database, key=key, first=first)
    return [(CHEAP, cheap), (_backend_name(real), last)]


@dataclass(frozen=True)
class _Confirmed:
    """An attempt with a cheap backend; what it finds is tried with the real one, whose word counts."""

    cheap: Attempts
    real: Attempts

    def __call__(self, sequence: Sequence) -> Examined:
        cheap = self.cheap(sequence)
        if cheap.finding is None:
            return cheap
        # What only the cheap backend shows is a fault of that backend, not of the program.
        real = self.real(sequence)
        return replace(real, compiles=cheap.compiles + real.compiles)


def _backend_name(backend: Any) -> str:
    if isinstance(backend, str):
        return backend
    return getattr(backend, "__qualname__", type(backend).__name__)


def attempts_of(run: CellTrial) -> Attempts:
    """Attempts on the program of a cell."""
    from pytest_torchcompile.fuzz.sequence_run import Attempts

    return Attempts(run.make, run.pristine, run.settings, run.batch, run.loss, run.train, run.seed, run.unit, run.root,
                    run.job.limits)


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


def write_test(run: CellTrial, sequence: Sequence) -> str:
    """A pytest file that runs the sequence on the cell, and looks for others once its settings are removed."""
    name = re.sub(r"\W+", "_", run.cell.id).strip("_")
    return _TEST.format(name=name, matrix=run.matrix, cell=run.cell.id, calls=as_code(sequence))
