"""Noisy runs of a program: a few run the program itself, further ones its operators alone, by a transcript."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_torchcompile.oracle.dice import Dice
from pytest_torchcompile.oracle.estimate import as_real, small_ones_to_cpu
from pytest_torchcompile.oracle.measurement import read_numbers
from pytest_torchcompile.oracle.recording import Fault, Recording

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.transcript import Transcript

__all__ = ["NoisyRuns"]

# Runs of the program itself before a transcript is made, which costs as much as one or two. On a CPU the operators take
# half of the time of a run, on a GPU a tenth.
_BEFORE: Final = {"cpu": 4}
_BEFORE_ON_GPU: Final = 1
# How far the values of two runs with the same noise may be apart, as a GPU may add up in another order: in parts of
# what other noise changes, and in rounding units of a leaf's largest value.
_SHARE: Final = 2.0**-8
_OWN: Final = 2.0**4
# Elements of a value that are kept from one draw to the next.
_SAMPLED: Final = 1 << 15


@dataclass
class _Draw:
    """A run with noise, and its values by name."""

    sequence: int
    noise: float
    rest: bool
    values: dict[str, Any]

    def sampled(self) -> _Draw:
        """What is kept of it: of a long value elements at even distances."""
        return replace(self, values={name: _sample(value) for name, value in self.values.items()})


class NoisyRuns:
    """Runs a program with noise, time after time."""

    def __init__(self, dice: Dice, device: str, wide: torch.dtype,
                 run: Callable[[float, bool, Transcript | None], Recording],
                 run_again: Callable[[Transcript, float, bool], dict[str, Any]]) -> None:
        """Take a program.

        Args:
            dice: Where the noise comes from.
            device: The type of the device that the program runs on.
            wide: The dtype that it runs in.
            run: Runs it with so many times its usual noise; the second argument as ``rest`` of ``record``. The
                transcript is told what runs.
            run_again: Runs it so by a transcript; raises what operators raise.
        """
        self._dice, self._wide = dice, wide
        self._run, self._run_again = run, run_again
        self._before = _BEFORE.get(device, _BEFORE_ON_GPU)
        self._made = 0
        self.transcript: Transcript | None = None
        # Whether the transcript has the pass through outputs that the loss leaves out.
        self._has_rest = False
        # The draw before the one that makes a transcript.
        self._earlier: _Draw | None = None

    def draw(self, sequence: int, noise: float, rest: bool) -> tuple[dict[str, Any], Fault | None]:
        """Run it with the noise of a sequence of the dice. Returns the values by name, and what it raised."""
        self._made += 1
        if self.transcript is not None and (self._has_rest or not rest):
            self._dice.begin_sequence(sequence)
            try:
                return self._run_again(self.transcript, noise, rest), None
            except Exception:  # the program itself may do otherwise, or raises something of its own
                self.transcript = None
        earlier, self._earlier = self._earlier, None
        transcript = None if earlier is None else _new_transcript()
        self._dice.begin_sequence(sequence)
        drawn = self._run(noise, rest, transcript)
        made = _Draw(sequence, noise, rest, drawn.values_by_name())
        if drawn.error is not None:
            return made.values, drawn.error
        if self._made == self._before:
            self._earlier = made.sampled()
        if transcript is not None and earlier is not None:
            transcript.end()
            if not transcript.why and self._repeats(transcript, earlier, made):
                self.transcript, self._has_rest = transcript, rest
        return made.values, None

    def _repeats(self, transcript: Transcript, earlier: _Draw, made: _Draw) -> bool:
        """Whether the transcript of a run gives the values of an earlier one, with the noise of that.

        With its own noise it would give what it has taken for a constant, too.
        """
        self._dice.begin_sequence(earlier.sequence)
        try:
            again = self._run_again(transcript, earlier.noise, made.rest and earlier.rest)
        except Exception:  # what Python code makes of an error is not in it
            return False
        # The earlier draw may have had a second pass, and this one none.
        names = earlier.values.keys()
        if made.rest or not earlier.rest:
            names_fit = again.keys() == names
        else:
            names_fit = again.keys() <= names
        return names_fit and self._are_near(again, earlier.values, made.values)

    def _are_near(self, again: dict[str, Any], earlier: dict[str, Any], made: dict[str, Any]) -> bool:
        """Whether a run has the values of the earlier one, but for a part of what the other noise of ``made`` moves."""
        again, earlier, made = map(small_ones_to_cpu, (again, earlier, made))
        measured = []
        for name, value in again.items():
            expected, other = earlier[name], made[name]
            if not isinstance(expected, torch.Tensor):
                if value != expected:
                    return False
            elif not isinstance(value, torch.Tensor) or value.shape != other.shape:
                return False
            elif value.numel():
                value, expected, other = _finite(_sample(value)), _finite(expected), _finite(_sample(other))
                if value.shape != expected.shape:
                    return False
                measured += [(value - expected).abs().amax(), (other - expected).abs().amax(), expected.abs().amax()]
        numbers = read_numbers(*measured)
        own = _OWN * torch.finfo(self._wide).eps
        for distance, moved_by, largest in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
            if distance > _SHARE * moved_by + own * largest:
                return False
        return True

    def held_tensors(self) -> list[torch.Tensor]:
        """What is kept."""
        held = [] if self.transcript is None else self.transcript.held_tensors()
        if self._earlier is not None:
            held += [value for value in self._earlier.values.values() if isinstance(value, torch.Tensor)]
        return held


def _sample(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.numel() <= _SAMPLED:
        return value
    return value.reshape(-1)[:: math.ceil(value.numel() / _SAMPLED)].clone()


def _finite(value: torch.Tensor) -> torch.Tensor:
    """Its numbers, with another one in the place of what is not finite."""
    value = as_real(value)
    if value.is_floating_point():
        return value.nan_to_num(nan=-1.0, posinf=-2.0, neginf=-3.0)
    return value.double()


def _new_transcript() -> Transcript:
    # Here, for few programs are drawn so often.
    from pytest_torchcompile.oracle.transcript import Transcript

    return Transcript()
