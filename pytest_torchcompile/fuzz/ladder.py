"""The ladder: what depends on shapes alone is searched for with a cheap backend, then everything with the real one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.dims import Dims
from pytest_torchcompile.fuzz.drawing import shape_sequences, sweep
from pytest_torchcompile.fuzz.drawn_call import Sequence
from pytest_torchcompile.fuzz.search import Budget, Examined, Result, search

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase

    from pytest_torchcompile.fuzz.sequence_run import Attempts

__all__ = ["CHEAP", "climb"]

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
        return [(CHEAP, search(strategy, dims, attempts, budget, seed=seed, database=database, key=key,
                               first=first))]
    half = replace(budget, examples=max(1, budget.examples // 2), drawing=budget.drawing / 2)
    cheap = search(strategy, dims, _Confirmed(attempts.on(CHEAP), attempts), half, seed=seed, first=first)
    rungs = [(CHEAP, cheap)]
    if cheap.finding is None:
        rest = replace(budget, seconds=max(0.0, budget.seconds - cheap.seconds),
                       compiles=max(0, budget.compiles - cheap.compiles))
        other = seed + 1  # other sequences than those that held on the first rung
        rungs.append((_name(real), search(strategy, dims, attempts, rest, seed=other, database=database, key=key,
                                           first=first)))
    return rungs


@dataclass(frozen=True)
class _Confirmed:
    """An attempt with a cheap backend; what it finds is tried with the real one, whose word counts."""

    cheap: Attempts
    real: Attempts

    def __call__(self, sequence: Sequence) -> Examined:
        cheap = self.cheap(sequence)
        if cheap.finding is None:
            return cheap
        real = self.real(sequence)
        return replace(real, compiles=cheap.compiles + real.compiles)


def _name(backend: Any) -> str:
    return backend if isinstance(backend, str) else getattr(backend, "__qualname__", type(backend).__name__)
