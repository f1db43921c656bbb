"""The search in a cell: what depends on shapes alone is found with a cheap backend, everything else with the real one.

What it finds is written down as a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.dims import Dims
from pytest_torchcompile.fuzz.drawn_call import Sequence, as_code, shape_sequences, sweep
from pytest_torchcompile.fuzz.search import Budget, Examined, FailingSequence, Result, Search, search

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase

    from pytest_torchcompile.fuzz.sequence_run import Attempts
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHEAP", "all_failing", "attempts_of", "climb", "write_test"]

CHEAP = "eager"
"""The backend of the first rung: capture and guards, without AOTAutograd and without generated code."""


def climb(attempts: Attempts, dims: Dims, budget: Budget, *, flips: bool = False, others: Iterable[int] = (),
          seed: int = 0, database: ExampleDatabase | None = None, key: str = "") -> list[tuple[str, Result]]:
    """Search with CHEAP for half of the budget, then with the real backend. Returns each backend and what came of it.

    A sequence counts only if it fails with the real backend too: what the cheap one finds is tried there, every time
    that it is made smaller. Unless these are wrong numbers, which nothing is worse than, the real backend is searched
    after that; :func:`all_failing` has what both found. A program whose backend is CHEAP has one rung.
    """
    real = attempts.settings["backend"]
    others = set(others)
    strategy = shape_sequences(dims, flips=flips, others=others)
    first = sweep(dims, others=others)
    if real == CHEAP:
        only = search(strategy, dims, attempts, budget, seed=seed, database=database, key=key, first=first)
        return [(CHEAP, only)]
    # Half of the sequences, and half of the share of time in which new ones are drawn.
    half = replace(budget, examples=max(1, budget.examples // 2), drawing=budget.drawing / 2)
    cheap = Search(strategy, dims, _Confirmed(attempts.with_backend(CHEAP), attempts), half, seed, first=first)
    cheap.find()
    if cheap.found_worst:
        cheap.shrink()
        return [(CHEAP, cheap.result)]
    rest = replace(budget, seconds=max(0.0, budget.seconds - cheap.result.seconds),
                   compiles=max(0, budget.compiles - cheap.result.compiles))
    told = frozenset(failing.problem.kind for failing in cheap.result.failing)
    # Another seed: other sequences than those that held on the first rung.
    last = Search(strategy, dims, attempts, rest, seed + 1, database, key, first, told)
    last.find()
    last.shrink()
    # What is mild is made small with what is left of the whole budget.
    cheap.budget = replace(budget, compiles=max(0, budget.compiles - last.result.compiles))
    cheap.shrink()
    return [(CHEAP, cheap.result), (_backend_name(real), last.result)]


def all_failing(rungs: Iterable[tuple[str, Result]]) -> list[FailingSequence]:
    """What was found on all rungs, the worst first."""
    together = Result()
    for _, result in rungs:
        together.failing += result.failing
    return together.worst_first


@dataclass(frozen=True)
class _Confirmed:
    """An attempt with a cheap backend; what it finds is tried with the real one, whose word counts."""

    cheap: Attempts
    real: Attempts

    def __call__(self, sequence: Sequence) -> Examined:
        cheap = self.cheap(sequence)
        if cheap.problem is None:
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
