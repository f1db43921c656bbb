"""reference(): what the program computes without rounding, and how much rounding moves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle.dice import Dice
from pytest_torchcompile.oracle.expected import Reference
from pytest_torchcompile.oracle.noise import Wide
from pytest_torchcompile.oracle.precision import input_units
from pytest_torchcompile.oracle.program import Program
from pytest_torchcompile.oracle.recording import Fault, Recording
from pytest_torchcompile.oracle.repetition import RUNS
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.oracle.units import FLOAT32_UNIT, unit_of

__all__ = ["DRAWS", "reference"]

_ROUNDINGS = 4.0
"""How many roundings parameters and inputs are disturbed by where nothing wider than eager runs."""
DRAWS = (1, 4, 36)
"""Noise draws that a comparison has: at first, after a first suspicion, before a suspicion becomes a verdict."""


def reference(
    module: torch.nn.Module | Callable[..., Any],
    batch: Batch,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    train: bool = True,
    seed: int = 0,
    tape: Tape | None = None,
    unit: float | None = None,
    call: Callable[..., Any] | None = None,
    also: tuple[Batch, ...] = (),
) -> Reference:
    """Run copies of ``module`` in float64, once exactly and once with rounding noise; more when there is a suspicion.

    Args:
        module: The eager model in the state from which the recordings started; copied, never changed.
        batch: What the recordings were made with.
        loss: As for ``record``.
        train: As for ``record``.
        seed: As for ``record``; the noise is drawn from it too, so that a verdict can be repeated.
        tape: Of the eager recording, so that dropout and its kin draw the same numbers.
        unit: The unit roundoff to assume in every operator; ``None``: the one that the tape has seen each round
            by, else that of the narrowest floating dtype among parameters, buffers and inputs.
        call: What runs ``module``, where that is not the module itself: a function that calls it.
        also: Batches of other replicas; as for ``record``.
    """
    program = Program.of(module, batch, call, loss=loss, train=train, seed=seed, tape=tape, also=also)
    try:
        program = program.copied()
    except Exception as error:
        found = Reference(program.eager())
        found.why = f"the model can't be copied: {type(error).__name__}: {error}"
        return found
    return _Runs(program, unit)


class _Runs(Reference):
    """A reference made by running copies of a program: the first kind of run that works."""

    def __init__(self, program: Program, unit: float | None) -> None:
        self.program, self.unit = program, unit or program.unit
        self._by_operator = unit is None and self.unit > unit_of(torch.float64)
        self.kind, self.why, self.draws, self._stage = "eager-only", "", 0, 0
        self.estimates = {}
        self._dice = Dice(program.seed + 1000)
        self._twin: Recording | None = None
        self._twins: list[Recording] = []
        self._refused: Fault | None = None
        self._again: dict[str, Any] | None = None
        reasons = []
        for kind in _kinds(self.unit):
            reason = self._try(kind)
            if not reason:
                break
            reasons.append(reason)
        else:
            self.kind = "eager-draws"
            if self._draw_from_eager():
                reasons.append("noise is what disturbed parameters and inputs make of eager itself")
                self.why = "; ".join(reasons)
                return
            self.kind = "eager-only"
            self._expect(self.twin())
            if self.twin().error is not None:
                reasons.append(f"a second eager run: {self.twin().error}")
        self.why = "; ".join(reasons)

    def _try(self, kind: str) -> str:
        """Make the estimates; return why that failed, or nothing."""
        self.kind = kind
        exact = self._run(0.0)
        if exact.error is not None:
            return f"{kind}: {exact.error}"
        self._expect(exact, self._ranges())
        tries = 0
        while not self.draws and tries < DRAWS[1]:  # noise may take a program where it raises
            self._draw(1.0)
            tries += 1
        return "" if self.draws else f"{kind}: every run with noise raised, the last one {self._refused}"

    def _draw_from_eager(self) -> bool:
        """Take eager itself for what is expected, and draw noise in its own precision; whether that worked."""
        if self.twin().error is not None:
            return False
        self._expect(self.twin(), self._ranges())
        self._draw(1.0)
        return bool(self.draws)

    def _ranges(self) -> dict[str, float]:
        """Where the range of each leaf's dtype ends; asked only of float16, whose end programs do reach."""
        if self.unit != unit_of(torch.float16):
            return {}
        found = {}
        for name, _, value in self.twin().values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                found[name] = torch.finfo(value.dtype).max
        return found

    def more(self) -> bool:
        """Draw three more; the next time 32, half of them with twice the noise, so that knife-edge decisions flip."""
        if not self.draws or self._stage == len(DRAWS) - 1:
            return False
        self._stage += 1
        last = self._stage == len(DRAWS) - 1
        for number in range(DRAWS[self._stage] - DRAWS[self._stage - 1]):
            self._draw(1.0 + number % 2 if last else 1.0)
        return True

    def twin(self) -> Recording:
        """A second eager run; made when somebody asks."""
        if self._twin is None:
            self._twin = self.program.eager()
        return self._twin

    def twins(self) -> list[Recording]:
        """The second eager run and :data:`RUNS` further ones; made when somebody asks."""
        if not self._twins:
            self._twins = [self.twin(), *(self.program.eager() for _ in range(RUNS))]
        return self._twins

    def repeats(self, name: str) -> bool:
        """Run the exact program once more; made when somebody asks."""
        estimate = self.estimates.get(name)
        if estimate is None or not self.draws:
            return False
        if self._again is None:
            again = self._run(0.0)
            self._again = {n: value for n, _, value in again.values()}
        return estimate.repeated_by(self._again.get(name), self.unit)

    @property
    def nbytes(self) -> int:
        """Memory of the estimates and of the copy of the model."""
        return super().nbytes + self.program.nbytes

    def _draw(self, noise: float) -> None:
        drawn = self._run(noise)
        self._refused = drawn.error
        if drawn.error is None:
            self.draws += 1
            values: dict[str, Any] = {name: value for name, _, value in drawn.values()}
            for name, estimate in self.estimates.items():
                estimate.add(values.get(name), plain=noise == 1)

    def _run(self, noise: float) -> Recording:
        if self.kind == "eager-draws":
            return self._eagerly(noise)
        wide = torch.float32 if self.kind == "float32" else torch.float64
        try:
            return self._wide(wide, noise)
        except Exception as error:  # a device without float64, no memory for it
            return Recording(error=Fault.of(error, "widening"))

    def _eagerly(self, noise: float) -> Recording:
        """Eager with its parameters and inputs disturbed by a few roundings: less would be rounded away, and each
        operator behind them rounds once more."""
        if not noise:
            return self.program.eager()
        try:
            return self.program.disturbed(lambda tensor: self._disturb(tensor, _ROUNDINGS * noise * self.unit))
        except Exception as error:  # tensors that refuse to be written to
            return Recording(error=Fault.of(error, "disturbing"))

    def _wide(self, wide: torch.dtype, noise: float) -> Recording:
        if self.kind == "float64-inputs":
            return self.program.wide(wide, None, lambda t: self._disturb(t, noise * self.unit))
        # less than one unit in the last place can't be drawn in the same dtype
        same = self.kind == "same-precision"
        unit, accumulator = (2 * self.unit,) * 2 if same else (self.unit, FLOAT32_UNIT)
        mode = Wide(
            wide, self.program.tape, dice=self._dice, factor=noise, unit=unit, accumulator=min(unit, accumulator),
            inputs=input_units(self.program.tensors, self.unit) if noise else {}, by_operator=self._by_operator,
        )  # fmt: skip
        return self.program.wide(wide, mode)

    def _disturb(self, tensor: torch.Tensor, unit: float) -> None:
        if unit:
            self._dice.disturb(tensor, unit)


def _kinds(unit: float) -> list[str]:
    if unit <= unit_of(torch.float64):
        return ["same-precision", "float64-inputs"]
    return ["float64", "float32", "float64-inputs"] if unit > FLOAT32_UNIT else ["float64", "float64-inputs"]
