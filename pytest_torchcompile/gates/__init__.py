"""The three gates of the production layer, by themselves: is it safe to compile, on this machine, with this torch?

``pytest-torchcompile gates`` runs them on small models that are broken in every way we know. The same three hold for
each cell of a matrix as the checks of the same names. To add one: a file here with a function that yields what it
tried, and its line in GATES. ``breaks.py`` has the ways in which models are broken.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Final

__all__ = ["GATES", "Outcome", "Place", "Tried", "run"]


@dataclass(frozen=True)
class Place:
    """Where models run, and how healthy ones are compiled."""

    device: str = "cpu"
    backend: str = "aot_eager"


@dataclass(frozen=True)
class Outcome:
    """What one gate came to."""

    gate: str
    ok: bool
    text: str
    """What was proven, or what is wrong; one line."""
    seconds: float

    def __str__(self) -> str:
        verdict = "pass" if self.ok else "FAIL"
        return f"{verdict}  {self.gate:16} {self.text} ({self.seconds:.1f} s)"


GATES: Final = {
    "safe_fallback": "pytest_torchcompile.gates.fallback:tried",
    "smoketest": "pytest_torchcompile.gates.smoke:tried",
    "shape_stability": "pytest_torchcompile.gates.shapes:tried",
}
"""Each gate's function: ``tried(place)`` yields one :class:`Tried` after the other."""


@dataclass(frozen=True)
class Tried:
    """One thing that was tried."""

    name: str
    wrong: str = ""
    """What is wrong with it; empty if nothing is."""


def run(place: Place) -> Iterator[Outcome]:
    """Try each gate, in order. A gate that raises has failed."""
    for gate, target in GATES.items():
        start = time.perf_counter()
        trials: list[Tried] = []
        try:
            module, _, name = target.partition(":")
            tried: Callable[[Place], Iterator[Tried]] = getattr(import_module(module), name)
            trials += tried(place)
        except Exception as error:
            # What it had tried until then still counts.
            last = traceback.extract_tb(error.__traceback__)[-1]
            trials.append(Tried("the gate itself", f"{type(error).__name__}: {error} ({last.name}:{last.lineno})"))
        yield _gate_outcome(gate, trials, time.perf_counter() - start)


def _gate_outcome(gate: str, trials: list[Tried], seconds: float) -> Outcome:
    wrong = [trial for trial in trials if trial.wrong]
    if not trials:
        return Outcome(gate, False, "nothing was tried", seconds)
    if not wrong:
        return Outcome(gate, True, f"{len(trials)} tried: {', '.join(trial.name for trial in trials)}", seconds)
    text = "; ".join(f"{trial.name}: {' '.join(trial.wrong.split())}" for trial in wrong)
    return Outcome(gate, False, f"{len(wrong)} of {len(trials)} failed: {text}", seconds)
