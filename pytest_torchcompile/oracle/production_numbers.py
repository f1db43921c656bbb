"""Production numbers: a trial whose compiled code draws Inductor's own random numbers, and eager is given the same.

So what production compiles is judged value by value, and is compiled once. Where that can't be done, or where anything
is not right so, the trial is run again with eager's numbers (``fallback_random``), and that run is what counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from pytest_torchcompile.backends.toolkit import Toolkit
from pytest_torchcompile.gauges.random_seeds import can_note_seeds, noted_seeds
from pytest_torchcompile.oracle.calls import EagerCall
from pytest_torchcompile.oracle.discrepancies import find_discrepancies
from pytest_torchcompile.oracle.inductor_numbers import KNOWN, LAYOUTS, GivenNumbers, SeedGroup, given_numbers
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.spread import Spread
from pytest_torchcompile.oracle.trial_account import TrialAccount
from pytest_torchcompile.state.torch_state import own_random_draws

__all__ = ["ProductionNumbers", "ends_in_inductor", "is_settled", "look_alike", "numbers_for"]

_INDUCTORS: Final = ("inductor", "regional_inductor")


class ProductionNumbers:
    """What the graphs of a call draw, and the runs that draw the same eagerly."""

    def __init__(self, layouts: tuple[str, ...]) -> None:
        """``layouts``: as ``LAYOUTS`` has them for the device of the model."""
        self.groups: tuple[SeedGroup, ...] = ()
        """Taken of the first compiled call; empty before."""
        self.layouts = layouts
        self.layout = layouts[0]
        self._noted: list[torch.Tensor] = []
        self._given: GivenNumbers | None = None

    @property
    def key(self) -> tuple[SeedGroup | str, ...]:
        """What tells an eager run with these numbers from one with others, of the same seed."""
        return (self.layout, *self.groups)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Have compiled code draw its own numbers while the block runs, and note the seeds."""
        with own_random_draws(), noted_seeds() as noted:
            yield
        self._noted = noted

    @contextmanager
    def given(self) -> Iterator[None]:
        """Give the same numbers to an eager run, where it is known what graphs draw."""
        if not self.groups:
            yield
            return
        with given_numbers(self.groups, self.layout) as given:
            yield
        self._given = given

    def take_groups(self) -> None:
        """Take what the compiled call has drawn for what each call draws."""
        self.groups = tuple((seeds.device.type, seeds.numel()) for seeds in self._noted)

    def agree(self) -> bool:
        """Whether the last eager run has drawn the seeds of the last compiled one, and all of them served it."""
        if self._given is None or not self._given.is_complete:
            return False
        eager, compiled = self._given.seeds, self._noted
        return len(eager) == len(compiled) and all(map(torch.equal, eager, compiled))


def numbers_for(trial: TrialAccount, done: EagerCall, spread: Spread) -> ProductionNumbers | None:
    """For a trial whose first call was run eagerly; None where the model draws nothing, or what nobody can give it.

    CUDA graphs draw without telling, and several ranks would have to agree.
    """
    options = trial.options
    if not options.compared or done.recording.error or not trial.draws or trial.replayed:
        return None
    alone = options.one_process is None and type(spread) is Spread
    if not alone or not ends_in_inductor(trial) or not can_note_seeds():
        return None
    tape = trial.tapes[done.call.index, done.call.other]
    kinds = {torch.device(name).type for name in done.recording.generators}
    if not kinds <= LAYOUTS.keys() or not {name for name, _ in tape.draws} <= KNOWN:
        return None
    return ProductionNumbers(LAYOUTS["cuda" if "cuda" in kinds else "cpu"])


def ends_in_inductor(trial: TrialAccount) -> bool:
    """Whether Inductor makes the code; of a backend that is a user's function it is taken to be so."""
    backend = trial.settings.get("backend") or "inductor"
    if isinstance(backend, Toolkit):
        return backend.compiler in _INDUCTORS
    return backend == "inductor" or not isinstance(backend, str)


def is_settled(trial: TrialAccount) -> bool:
    """Whether all is right that was compared with the numbers of production."""
    if trial.compiled.error is not None:
        return False
    leaves = [*trial.leaves, *trial.trained]
    # What eager did not repeat may be a mistake in giving it the numbers.
    return not find_discrepancies(leaves) and all(leaf.kind != "nondeterministic" for _, leaf in leaves)


def look_alike(eager: Recording, compiled: Recording) -> bool:
    """Whether the loss and the outputs of two runs are near to each other, as they are with the same numbers.

    Other masks of a dropout change an output by a good part of it. This only saves what it costs to judge such a call:
    whatever passes is judged as any other.
    """
    theirs = _results_of(compiled)
    return all(_is_near(value, theirs.get(name)) for name, value in _results_of(eager).items())


def _results_of(recording: Recording) -> dict[str, Any]:
    results = {name: item.value for name, item in recording.outputs.items()}
    return {**results, "": recording.loss}


def _is_near(value: Any, other: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.layout is not torch.strided:
        return True
    if not isinstance(other, torch.Tensor) or other.shape != value.shape or other.dtype != value.dtype:
        return False
    apart, size = (other.float() - value.float()).norm(), value.float().norm()
    # So far that a mask which differs is noticed, and rounding is not.
    near = torch.finfo(value.dtype).eps ** 0.25
    # With NaN no comparison is true: that is for the oracle to judge.
    return not float(apart) > near * float(size)
