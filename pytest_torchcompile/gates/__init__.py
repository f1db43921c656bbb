"""The three gates of the production layer, by themselves: is it safe to compile, on this machine, with this torch?

``pytest-torchcompile gates`` runs them on small models that are broken in every way we know. The same three hold for
each cell of a matrix as the checks of the same names. To add one: a file here with a function that yields what it
tried, and its line in GATES. ``breaks.py`` has the ways in which models are broken.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Final

from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.ranks.serving import set_environment

__all__ = ["GATES", "Place", "Tried", "TriedGate", "run", "run_command"]


@dataclass(frozen=True)
class Place:
    """Where models run, and how healthy ones are compiled."""

    device: str = "cpu"
    backend: str = "aot_eager"


@dataclass(frozen=True)
class TriedGate:
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


def run(place: Place) -> Iterator[TriedGate]:
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
        yield _judge_trials(gate, trials, time.perf_counter() - start)


def _judge_trials(gate: str, trials: list[Tried], seconds: float) -> TriedGate:
    wrong = [trial for trial in trials if trial.wrong]
    if not trials:
        return TriedGate(gate, False, "nothing was tried", seconds)
    if not wrong:
        return TriedGate(gate, True, f"{len(trials)} tried: {', '.join(trial.name for trial in trials)}", seconds)
    text = "; ".join(f"{trial.name}: {' '.join(trial.wrong.split())}" for trial in wrong)
    return TriedGate(gate, False, f"{len(wrong)} of {len(trials)} failed: {text}", seconds)


# ---------------------------------------------------------------------------------------------------------- the command
def run_command(given: argparse.Namespace) -> int:
    """Run the gates and print what came of each; 1 if one does not pass.

    Raises :class:`UsageError` for a device or a backend that torch does not have here.
    """
    set_environment()
    _refuse_device(given.device)
    # On a CPU Inductor needs a C++ compiler, and minutes.
    usual = "aot_eager" if given.device == "cpu" else "inductor"
    backend = given.backend or usual
    _refuse_backend(backend)
    tried: list[TriedGate] = []
    for gate in run(Place(given.device, backend)):
        tried.append(gate)
        if not given.json:
            print(gate, flush=True)
    code = int(not all(gate.ok for gate in tried))
    if given.json:
        gates = [asdict(gate) for gate in tried]
        print(json.dumps({"exit_code": code, "device": given.device, "backend": backend, "gates": gates}, indent=1))
    return code


def _refuse_backend(backend: str) -> None:
    """Raises UsageError for a backend that torch does not know: what has to fail would fail with it for nothing."""
    import torch

    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise UsageError(f"--backend {backend!r} is no backend of torch {torch.__version__}; {nearest(backend, known)}")


def _refuse_device(device: str) -> None:
    """Raises UsageError for a device that this machine, or torch, does not have."""
    import torch

    try:
        torch.ones(1, device=device)
    except Exception as error:
        # Each device has its own way to say no.
        text = " ".join(str(error).split())
        raise UsageError(f"--device {device}: torch {torch.__version__} can't use it here: {text[:200]}") from error
