"""Noisy runs of a program: the first few run the program itself, further ones its operators alone, by a transcript."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from pytest_torchcompile.oracle.dice import Dice
from pytest_torchcompile.oracle.estimate import small_ones_to_cpu
from pytest_torchcompile.oracle.measurement import read_numbers
from pytest_torchcompile.oracle.recording import Fault, Recording
from pytest_torchcompile.oracle.transcript import Transcript

__all__ = ["NoisyRuns"]

# Runs of the program itself before a transcript is made, which costs as much as one or two. On a CPU the operators take
# half of the time of a run, on a GPU a tenth.
_BEFORE: Final = {"cpu": 4}
_BEFORE_ON_GPU: Final = 1
# How far the values of two runs with the same noise may be apart, in rounding units of the dtype that they ran in, of
# the largest value of all: a GPU may add up in another order. And in units of the program, of a leaf's largest value.
_OWN: Final = 2.0**10
_SHARE: Final = 2.0**-12


class NoisyRuns:
    """Runs a program with noise, time after time."""

    def __init__(self, dice: Dice, device: str, wide: torch.dtype, unit: float,
                 run: Callable[[float, bool, Transcript | None], Recording],
                 run_again: Callable[[Transcript, float, bool], dict[str, Any]]) -> None:
        """Take a program.

        Args:
            dice: Where the noise comes from.
            device: The type of the device that the program runs on.
            wide: The dtype that it runs in.
            unit: The unit roundoff that it works with.
            run: Runs it with so many times its usual noise; the second argument as ``rest`` of ``record``. The
                transcript is told what runs.
            run_again: Runs it so by a transcript; raises what operators raise.
        """
        self._dice, self._wide, self._unit = dice, wide, unit
        self._run, self._run_again = run, run_again
        self._before = _BEFORE.get(device, _BEFORE_ON_GPU)
        self._made = 0
        self.transcript: Transcript | None = None
        # Whether the transcript has the pass through outputs that the loss leaves out.
        self._has_rest = False

    def draw(self, sequence: int, noise: float, rest: bool) -> tuple[dict[str, Any], Fault | None]:
        """Run it with the noise of a sequence of the dice. Returns the values by name, and what it raised."""
        self._made += 1
        if self.transcript is not None and (self._has_rest or not rest):
            self._dice.begin_sequence(sequence)
            try:
                return self._run_again(self.transcript, noise, rest), None
            except Exception:  # the program itself may do otherwise, or raises something of its own
                self.transcript = None
        transcript = Transcript() if self._made == self._before + 1 else None
        self._dice.begin_sequence(sequence)
        drawn = self._run(noise, rest, transcript)
        values = drawn.values_by_name()
        if transcript is not None and drawn.error is None:
            transcript.end()
            self._dice.begin_sequence(sequence)
            if not transcript.why and self._repeats(transcript, noise, rest, values):
                self.transcript, self._has_rest = transcript, rest
        return values, drawn.error

    def _repeats(self, transcript: Transcript, noise: float, rest: bool, values: Mapping[str, Any]) -> bool:
        """Whether the transcript of a run gives its values again, with the same noise."""
        try:
            again = self._run_again(transcript, noise, rest)
        except Exception:  # what Python code makes of an error is not in it
            return False
        if again.keys() != values.keys():
            return False
        again, values = small_ones_to_cpu(again), small_ones_to_cpu(dict(values))
        sizes, distances = [], []
        for name, value in values.items():
            other = again[name]
            if not isinstance(value, torch.Tensor):
                if value != other:
                    return False
            elif not isinstance(other, torch.Tensor) or other.shape != value.shape:
                return False
            elif value.numel():
                value, other = _finite(value), _finite(other)
                sizes.append(value.abs().amax())
                distances.append((value - other).abs().amax())
        numbers = read_numbers(*sizes, *distances)
        largest = numbers[: len(sizes)]
        own = _OWN * torch.finfo(self._wide).eps * max(largest, default=0.0)
        for size, distance in zip(largest, numbers[len(sizes) :], strict=True):
            if distance > own + _SHARE * self._unit * size:
                return False
        return True

    def held_tensors(self) -> list[torch.Tensor]:
        """What is kept."""
        return [] if self.transcript is None else self.transcript.held_tensors()


def _finite(value: torch.Tensor) -> torch.Tensor:
    """Its numbers, with another one in the place of what is not finite."""
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if value.is_floating_point():
        return value.nan_to_num(nan=-1.0, posinf=-2.0, neginf=-3.0)
    return value.double()
