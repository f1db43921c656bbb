"""Noisy runs of a program: a few run the program itself, further ones what was written down or recorded of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_torchcompile.oracle.dice import Dice
from pytest_torchcompile.oracle.estimate import as_real, small_ones_to_cpu
from pytest_torchcompile.oracle.measurement import read_numbers
from pytest_torchcompile.oracle.recording import Fault, Recording
from pytest_torchcompile.oracle.training import BY_LEFT_OUT

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.draw_graph import DrawGraph
    from pytest_torchcompile.oracle.transcript import Transcript

__all__ = ["NoisyRuns"]

# Runs of the program itself before the one that a transcript is made of. To write it down costs half a run or more.
_BEFORE: Final = 4
# How far values may be from those of the exact run, as a GPU may add up in another order: in parts of what noise
# changes, and in rounding units of a leaf's largest value.
_SHARE: Final = 2.0**-8
_OWN: Final = 2.0**4
# Elements of a value that are kept from one draw to the next.
_SAMPLED: Final = 1 << 15


@dataclass
class _Repeater:
    """What runs a program again, made of one of its runs."""

    made_of: Transcript | DrawGraph
    run: Callable[[int, float, bool], dict[str, Any]]
    """With the noise of a sequence, so many times the usual one; the third argument as ``rest`` of ``record``."""
    has_rest: bool
    """Whether that run had the pass through outputs that the loss leaves out."""
    noisy: dict[str, Any] | None = None
    """Values of that run, until this is shown to repeat the exact run without noise."""


class NoisyRuns:
    """Runs a program with noise, time after time."""

    def __init__(self, dice: Dice, wide: torch.dtype, exact: Callable[[], dict[str, Any]],
                 new_graph: Callable[[], DrawGraph | None],
                 run: Callable[[float, bool, Transcript | DrawGraph | None], Recording],
                 run_again: Callable[[Transcript, float, bool], dict[str, Any]]) -> None:
        """Take a program.

        Args:
            dice: Where the noise comes from.
            wide: The dtype that it runs in.
            exact: Gives the values by name of a run without noise.
            new_graph: Gives an empty graph; None where it can't be recorded.
            run: Runs it with so many times its usual noise; the second argument as ``rest`` of ``record``. The
                transcript or graph is told what runs.
            run_again: Runs it so by a transcript; raises what operators raise.
        """
        self._dice, self._wide = dice, wide
        self._exact, self._new_graph, self._run, self._run_again = exact, new_graph, run, run_again
        self._made = 0
        self._tries_graph = True
        self.why_no_graph = ""
        self._repeater: _Repeater | None = None

    @property
    def made_of(self) -> Transcript | DrawGraph | None:
        """What further draws are made by; None: by the program itself."""
        return None if self._repeater is None else self._repeater.made_of

    def draw(self, sequence: int, noise: float, rest: bool) -> tuple[dict[str, Any], Fault | None]:
        """Run it with the noise of a sequence of the dice. Returns the values by name, and what it raised."""
        if self._repeater is not None and rest and not self._repeater.has_rest:
            # A graph is recorded again, with the second pass.
            self.release()
        if self._repeater is not None and (self._repeater.has_rest or not rest):
            try:
                if self._is_proved(self._repeater):
                    return self._repeater.run(sequence, noise, rest), None
            except Exception:  # the program itself may do otherwise, or raises something of its own
                pass
            self._repeater = None
        if self._tries_graph:
            values = self._record_graph(sequence, noise, rest)
            if values is not None:
                return values, None
        transcript = None
        if self._made == _BEFORE:
            transcript = _new_transcript()
        self._dice.begin_sequence(sequence)
        drawn = self._run(noise, rest, transcript)
        values = drawn.values_by_name()
        if drawn.error is not None:
            return values, drawn.error
        self._made += 1
        if transcript is not None:
            transcript.end()
            if not transcript.why:
                self._repeater = _Repeater(transcript, partial(self._run_by, transcript), rest, _samples(values))
        return values, None

    def _run_by(self, transcript: Transcript, sequence: int, noise: float, rest: bool) -> dict[str, Any]:
        self._dice.begin_sequence(sequence)
        return self._run_again(transcript, noise, rest)

    def _record_graph(self, sequence: int, noise: float, rest: bool) -> dict[str, Any] | None:
        """Record a run, and make a draw by it. Returns its values; None where that can't be done."""
        self._tries_graph, graph = False, None
        try:
            graph = self._new_graph()
            if graph is None:
                return None
            values = self._proved_draw(graph, sequence, noise, rest)
            if values is not None:
                self._repeater = _Repeater(graph, partial(self._launch, graph), rest)
                self._made += 1
                return values
        except Exception as error:  # there is too little memory for it
            self.why_no_graph = f"{type(error).__name__}: {error}"
        if graph is not None:
            graph.release()
        return None

    def _proved_draw(self, graph: DrawGraph, sequence: int, noise: float, rest: bool) -> dict[str, Any] | None:
        """Record a graph, and make a draw by it; None where it can't be recorded, or does not repeat the exact run."""
        recorded = self._run(1.0, rest, graph)
        if recorded.error is not None:
            self.why_no_graph = graph.why or str(recorded.error)
            return None
        values = self._launch(graph, sequence, noise, rest)
        # It runs for the third time: what a launch does not put back has changed by now.
        quiet = self._launch(graph, sequence, 0.0, rest)
        if not self._are_near(quiet, _samples(values), rest):
            self.why_no_graph = "it does not repeat the exact run"
            return None
        return values

    def _launch(self, graph: DrawGraph, sequence: int, noise: float, rest: bool) -> dict[str, Any]:
        self._dice.begin_sequence(sequence)
        return graph.launch(self._dice.next_seed(), noise, rest)

    @property
    def can_launch(self) -> bool:
        """Whether further draws are launches of a graph."""
        return self._graph is not None

    @property
    def _graph(self) -> DrawGraph | None:
        made_of = self.made_of
        if made_of is None or not made_of.is_graph:
            return None
        return made_of

    def launch_exactly(self) -> dict[str, Any] | None:
        """The values of a second run of the program without noise, by a launch of the graph that was recorded of it.

        None where there is no graph, or it can't be launched.
        """
        if not self.can_launch or self._repeater is None or not self._repeater.has_rest:
            return None
        try:
            return self._repeater.run(0, 0.0, True)
        except Exception:  # the GPU has no memory left for the values
            return None

    def _is_proved(self, repeater: _Repeater) -> bool:
        """Whether what was made of a run with noise gives the values of the exact run, where it is run without.

        With its own noise it would give what it has taken for a constant, too.
        """
        if repeater.noisy is None:
            return True
        noisy, repeater.noisy = repeater.noisy, None
        return self._are_near(repeater.run(0, 0.0, repeater.has_rest), noisy, repeater.has_rest)

    def _are_near(self, again: dict[str, Any], noisy: dict[str, Any], has_rest: bool) -> bool:
        """Whether a run has all values of the exact one, but for a part of what noise has moved them by."""
        exact = self._exact()
        if not has_rest:
            exact = {name: value for name, value in exact.items() if not name.endswith(BY_LEFT_OUT)}
        if not again.keys() == noisy.keys() == exact.keys():
            return False
        again, exact = _samples(again), _samples(exact)
        again, exact, noisy = map(small_ones_to_cpu, (again, exact, noisy))
        measured = []
        for name, value in again.items():
            expected, other = exact[name], noisy[name]
            if not isinstance(value, torch.Tensor) or not isinstance(expected, torch.Tensor):
                if value != expected:
                    return False
            elif not value.shape == expected.shape == other.shape:
                return False
            elif value.numel():
                # What noise makes NaN of says nothing of how far it moves a number.
                other = other.where(other.isfinite(), expected)
                value, expected, other = _finite(value), _finite(expected), _finite(other)
                measured += [(value - expected).abs().amax(), (other - expected).abs().amax(), expected.abs().amax()]
        numbers = read_numbers(*measured)
        own = _OWN * torch.finfo(self._wide).eps
        for distance, moved_by, largest in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
            if distance > _SHARE * moved_by + own * largest:
                return False
        return True

    def release(self) -> None:
        """Give back the memory of a graph. The next draw records it again."""
        graph = self._graph
        if graph is not None:
            graph.release()
            self._repeater, self._tries_graph = None, True

    def held_tensors(self) -> list[torch.Tensor]:
        """What is kept."""
        if self._repeater is None:
            return []
        held = self._repeater.made_of.held_tensors()
        for value in (self._repeater.noisy or {}).values():
            if isinstance(value, torch.Tensor):
                held.append(value)
        return held


def _samples(values: dict[str, Any]) -> dict[str, Any]:
    """What is kept of values: of a long one elements at even distances."""
    return {name: _sample(value) for name, value in values.items()}


def _sample(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = as_real(value)
    if value.numel() > _SAMPLED:
        value = value.reshape(-1)[:: math.ceil(value.numel() / _SAMPLED)]
    return value.clone()


def _finite(value: torch.Tensor) -> torch.Tensor:
    """Its numbers, with another one in the place of what is not finite."""
    if value.is_floating_point():
        return value.nan_to_num(nan=-1.0, posinf=-2.0, neginf=-3.0)
    return value.double()


def _new_transcript() -> Transcript:
    # Here, for few programs are drawn so often.
    from pytest_torchcompile.oracle.transcript import Transcript

    return Transcript()
