"""reference(): what the program computes without rounding, and how much rounding moves it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle.counted_decisions import CountedDecisions, DecisionReplay
from pytest_torchcompile.oracle.dice import DRAWS, FEW, LAUNCHED, Dice, noise_of_draw
from pytest_torchcompile.oracle.draw_rows import add_draw
from pytest_torchcompile.oracle.estimate import Estimate, as_real, small_ones_to_cpu, small_to_cpu
from pytest_torchcompile.oracle.expected import BY_OPERATOR, RUNS, WIDE_DTYPES, WIDER, Reference, kinds_to_try
from pytest_torchcompile.oracle.measurement import read_numbers
from pytest_torchcompile.oracle.noise import Wide
from pytest_torchcompile.oracle.noisy_runs import NoisyRuns
from pytest_torchcompile.oracle.operator_rounding import FLOAT32_UNIT, input_units, unit_of
from pytest_torchcompile.oracle.program import Program, WideCopies
from pytest_torchcompile.oracle.recording import Fault, Recording
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.oracle.training import need_second_pass

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.draw_graph import DrawGraph
    from pytest_torchcompile.oracle.own_decisions import OwnDecisions
    from pytest_torchcompile.oracle.transcript import Transcript

__all__ = ["reference"]

# How many roundings parameters and inputs are disturbed by where nothing wider than eager runs.
_ROUNDINGS = 4.0
# How often decisions may be turned for one program.
_TURNS = 3


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
    draw: bool = True,
    kept: WideCopies | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
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
        kept: Wide copies of ``module``, empty at first, that further references of it may be given too; None where
            somebody may write to its parameters.
        around: Makes what is entered around a further eager run, as around that of the recording.
        draw: Whether to draw noise at once. If not it is drawn for the leaves that the exact run leaves suspicious.
    """
    program = Program.of(module, batch, call, loss=loss, train=train, seed=seed, tape=tape,
                         around=around)
    try:
        program = program.copied(kept)
    except Exception as error:
        eager_only = Reference(program.run_in_place())
        eager_only.why = f"the model can't be copied: {type(error).__name__}: {error}"
        return eager_only
    return _Runs(program, unit, draw)


class _Runs(Reference):
    """A reference made by running copies of a program: the first kind of run that works."""

    def __init__(self, program: Program, unit: float | None, draw: bool, decides: bool = False,
                 may_turn: int = _TURNS, of_eager: Reference | None = None) -> None:
        """As for :func:`reference`, or with other decisions than eager has taken.

        ``decides``: it decides for itself. ``may_turn``: how often decisions may still be turned.
        ``of_eager``: the reference with eager's decisions; None: this one.
        """
        self.program, self.unit = program, unit or program.unit
        self._given_unit, self._decides = unit, decides
        self._may_turn, self._of_eager = may_turn, of_eager
        self._replay: DecisionReplay | None = None
        self._own_decisions: OwnDecisions | None = None
        self._by_operator = unit is None and self.unit > unit_of(torch.float64)
        self.kind, self.why, self.draws = "eager-only", "", 0
        self.estimates = {}
        self._dice = Dice(program.seed + 1000)
        self._twin: Recording | None = None
        self._twins: list[Recording] = []
        self._orders: list[Recording] | None = None
        self._refused = 0
        self._again: dict[str, Any] | None = None
        # Of a launch without noise, until draws end.
        self._launched: dict[str, Any] | None = None
        self._kinds = kinds_to_try(self.unit)
        self._reasons: list[str] = []
        self._choose_kind(draw)

    def _choose_kind(self, draw: bool) -> None:
        """Take the first kind of run left that works, and make the estimates; with a draw if asked for or needed."""
        while self._kinds:
            self.kind = self._kinds.pop(0)
            self._noisy_runs = self._new_noisy_runs(WIDE_DTYPES[self.kind])
            exact = self._run_with(0.0)
            if self._replay is not None and (exact.error is not None or not self._replay.is_used_up):
                # It runs otherwise than eager did: a function remembers what it computed then.
                self._decides, self._replay = True, None
                exact = self._run_with(0.0)
            if exact.error is not None:
                self._reasons.append(f"{self.kind}: {exact.error}")
                continue
            self._expect_values(exact, self._ranges())
            # Eager's own error is a measure only where the run is wider than eager.
            if (not draw and self.kind in WIDER) or self._first_draw(self.estimates):
                break
        else:
            self.kind = "eager-draws"
            self._noisy_runs = self._new_noisy_runs(torch.float64)
            if self._draw_from_eager():
                self._reasons.append("noise is what disturbed parameters and inputs make of eager itself")
            else:
                self.kind = "eager-only"
                self._expect_values(self.twin())
                if self.twin().error is not None:
                    self._reasons.append(f"a second eager run: {self.twin().error}")
        self.why = "; ".join(self._reasons)

    def _new_noisy_runs(self, wide: torch.dtype) -> NoisyRuns:
        return NoisyRuns(self._dice, wide, self._exact_values, self._new_graph, self._run_with, self._run_again)

    def _new_graph(self) -> DrawGraph | None:
        if self.kind not in BY_OPERATOR or not any(tensor.is_cuda for tensor in self.program.tensors):
            return None
        # Here, for few machines have a GPU.
        from pytest_torchcompile.oracle.draw_graph import new_graph

        return new_graph(self.program.tensors, self.program.tape, WIDE_DTYPES[self.kind])

    def _exact_values(self) -> dict[str, Any]:
        return {name: estimate.value for name, estimate in self.estimates.items()}

    def _first_draw(self, names: Iterable[str]) -> bool:
        """Draw once; whether a run with noise worked, which may take a program where it raises."""
        for _ in range(FEW):
            refused = self._draw(0, names)
            if refused is None:
                return True
        self._reasons.append(f"{self.kind}: every run with noise raised, the last one {refused}")
        return False

    def _draw_from_eager(self) -> bool:
        """Take eager itself for what is expected, and draw noise in its own precision; whether that worked."""
        if self.twin().error is not None:
            return False
        self._expect_values(self.twin(), self._ranges())
        return self._draw(0, self.estimates) is None

    def _ranges(self) -> dict[str, float]:
        """Where the range of each leaf's dtype ends; asked only of float16, whose end programs do reach."""
        if self.unit != unit_of(torch.float16):
            return {}
        ranges = {}
        for name, _, value in self.twin().values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                ranges[name] = torch.finfo(value.dtype).max
        return ranges

    def more(self, names: Collection[str] | None = None) -> bool:
        """Draw for the leaves with the fewest draws, up to the next number of :data:`DRAWS`, or of those by a graph."""
        if names is None:
            names = self.estimates
        chosen = [name for name in names if name in self.estimates]
        if not chosen or self.kind == "eager-only":
            return False
        if not self.draws:
            if not self._first_draw(chosen):
                # With noise this kind of run raises: the next one.
                self._choose_kind(draw=True)
            return True
        made = min(self.estimates[name].offered for name in chosen)
        if made == DRAWS[-1]:
            return False
        numbers = LAUNCHED if self._noisy_runs.can_launch else DRAWS
        enough = next(number for number in numbers if number > made)
        for number in range(made, enough):
            self._draw(number, [name for name in chosen if self.estimates[name].offered == number])
        return True

    def end_draws(self) -> None:
        """Give back what only further draws need, and can be made again."""
        self._launched = None
        self._noisy_runs.release()

    def twin(self) -> Recording:
        """A second eager run; made when somebody asks."""
        if self._twin is None:
            self._twin = self.program.run_eager()
        return self._twin

    def twins(self) -> list[Recording]:
        """The second eager run and :data:`RUNS` further ones; made when somebody asks."""
        if not self._twins:
            self._twins = [self.twin()]
            self._twins += [self.program.run_eager() for _ in range(RUNS)]
        return self._twins

    def other_orders(self, name: str) -> Estimate | None:
        """Eager with its sums of repeated terms added up in other orders; made when somebody asks."""
        known = self.estimates.get(name)
        if known is None or not known.continuous or self.kind not in WIDER:
            return None
        if self._orders is None:
            # Here, for few comparisons need it.
            from pytest_torchcompile.oracle.summation_orders import run_in_other_orders

            self._orders = run_in_other_orders(self.program)
        estimate = Estimate(known.value)
        for recording in self._orders:
            value = recording.values_by_name().get(name)
            if self._of_eager is not None:
                value = self.moved(name, value, self._of_eager)
            if isinstance(value, torch.Tensor):
                value = as_real(value.detach()).to(estimate.value.dtype)
            estimate.add(value)
        if not estimate.draws:
            return None
        return estimate

    def deciding_as(self, values: Mapping[str, Any], accused: Collection[str]) -> Reference | None:
        """Of the same program."""
        taken, tape = self._taken_decisions, self.program.tape
        if taken is None or tape is None:
            return None
        if self._own_decisions is None:
            # Here, for few comparisons need it.
            from pytest_torchcompile.oracle.own_decisions import OwnDecisions

            self._own_decisions = OwnDecisions(taken, WIDE_DTYPES[self.kind], self._run_deciding, self.estimates,
                                               together=self._of_eager is None)
        theirs = self._own_decisions.taken_by(values, accused)
        if theirs is None:
            return None
        of_eager = self._of_eager or self
        if not theirs.taken:
            return _Runs(self.program, self._given_unit, False, decides=True, of_eager=of_eager)
        if not self._may_turn:
            return None
        deciding = replace(self.program, tape=tape.deciding(theirs))
        return _Runs(deciding, self._given_unit, False, may_turn=self._may_turn - 1, of_eager=of_eager)

    def _run_deciding(self, number: int, noise: float, decisions: DecisionReplay, rest: bool = True) -> Recording:
        self._dice.begin_sequence(number)
        return self.program.run_wide(decisions.wide, self._mode(noise, decisions=decisions), rest=rest)

    @property
    def _taken_decisions(self) -> CountedDecisions | None:
        """What was decided on counted numbers, if anything, and this run takes over."""
        tape = self.program.tape
        if self._decides or self.kind not in WIDER or tape is None or not tape.decisions.taken:
            return None
        return tape.decisions

    def repeats(self, name: str) -> bool:
        """Run the exact program once more; made when somebody asks."""
        if not self.draws:
            self.more()
        estimate = self.estimates.get(name)
        if estimate is None or not self.draws:
            return False
        if self._again is None:
            self._again = self._run_with(0.0).values_by_name()
        return estimate.is_repeated_by(self._again.get(name), self.unit)

    def is_repeated_by_graph(self, name: str) -> bool:
        """Whether the graph of a second run gives this leaf again."""
        if self._launched is None:
            self._launched = self._noisy_runs.launch_exactly() or {}
        estimate = self.estimates.get(name)
        if estimate is None or name not in self._launched:
            return False
        return estimate.is_repeated_by(self._launched[name], self.unit)

    def held_tensors(self) -> list[torch.Tensor]:
        """The estimates and the copies of the model."""
        return [*super().held_tensors(), *self.program.held_tensors, *self._noisy_runs.held_tensors()]

    def _draw(self, number: int, names: Iterable[str]) -> Fault | None:
        """Make a draw for some leaves; returns what it raised. The same number is the same noise whenever it is drawn.

        The first draw of all is repeated with other noise where it raises, or makes NaN of a leaf. ``_first_draw``
        calls again then, and the sequences of all draws are those behind the last one.
        """
        noise, share = noise_of_draw(number)
        names = list(names)
        # The first draw of all makes the second pass in any case: whether this kind of run takes noise is asked there.
        rest = not self.draws or need_second_pass(names)
        values, error = self._noisy_runs.draw(number + DRAWS[-1] * self._refused, noise, rest)
        if not self.draws:
            values = small_ones_to_cpu(values)
            refusal = error or self._lost_in(values)
            if refusal is not None:
                self._refused += 1
                return refusal
        estimates = {name: self.estimates[name] for name in names}
        if error is None:
            add_draw([(estimate, values.get(name)) for name, estimate in estimates.items()], share)
        for estimate in estimates.values():
            estimate.offered += 1
        self.draws = max(self.draws, number + 1)
        return error

    def _lost_in(self, values: dict[str, Any]) -> Fault | None:
        """A fault where noise makes NaN of a leaf: the program asks whether two numbers are equal, and they are not."""
        names, lost = [], []
        for name, estimate in self.estimates.items():
            drawn = values.get(name)
            if estimate.continuous and isinstance(drawn, torch.Tensor) and drawn.shape == estimate.value.shape:
                names.append(name)
                lost.append(_is_lost(estimate.value, small_to_cpu(drawn)))
        for name, is_lost in zip(names, read_numbers(*lost), strict=True):
            if is_lost:
                return Fault("ArithmeticError", f"noise makes NaN of {name}", "noise")
        return None

    def _run_with(self, noise: float, rest: bool = True,
                  listener: Transcript | DrawGraph | None = None) -> Recording:
        """Run the program as its kind says, with so many times its usual noise; 0: exactly. ``rest``: as for
        ``record``. ``listener``: is told what runs."""
        if self.kind == "eager-draws":
            return self._run_disturbed(noise, rest)
        try:
            return self._run_wide(noise, rest, listener)
        except Exception as error:  # a device without float64, no memory for it
            return Recording(error=Fault.of(error, "widening"))

    def _run_again(self, transcript: Transcript, noise: float, rest: bool) -> dict[str, Any]:
        return self.program.run_again(transcript, self._mode(noise), rest)

    def _run_disturbed(self, noise: float, rest: bool) -> Recording:
        """Eager with its parameters and inputs disturbed by a few roundings: less would be rounded away, and each
        operator behind them rounds once more."""
        if not noise:
            return self.program.run_eager()
        try:
            return self.program.run_disturbed(self._disturbance(_ROUNDINGS * noise * self.unit), rest)
        except Exception as error:  # tensors that refuse to be written to
            return Recording(error=Fault.of(error, "disturbing"))

    def _run_wide(self, noise: float, rest: bool, listener: Transcript | DrawGraph | None) -> Recording:
        wide = WIDE_DTYPES[self.kind]
        if self.kind == "float64-inputs":
            return self.program.run_wide(wide, None, self._disturbance(noise * self.unit), rest=rest)
        is_graph = listener is not None and listener.is_graph
        return self.program.run_wide(wide, self._mode(noise, listener), rest=rest, own_parameters=is_graph)

    def _mode(self, noise: float, listener: Transcript | DrawGraph | None = None,
              decisions: DecisionReplay | None = None) -> Wide:
        unit, accumulator = self.unit, min(self.unit, FLOAT32_UNIT)
        if self.kind == "same-precision":
            # less than one unit in the last place can't be drawn in the same dtype
            unit = accumulator = 2 * self.unit
        inputs = {}
        if noise:
            inputs = input_units(self.program.tensors, self.unit)
        dice = self._dice
        if listener is not None and listener.dice is not None:
            dice = listener.dice
        if decisions is None and self._taken_decisions is not None:
            decisions = self._replay = DecisionReplay(self._taken_decisions, WIDE_DTYPES[self.kind])
        return Wide(WIDE_DTYPES[self.kind], self.program.tape, dice=dice, factor=noise, unit=unit,
                    accumulator=accumulator, inputs=inputs, by_operator=self._by_operator, decisions=decisions,
                    listener=listener)

    def _disturbance(self, unit: float) -> Callable[[torch.Tensor], None]:
        def disturb(tensor: torch.Tensor) -> None:
            if unit:
                self._dice.disturb(tensor, unit)

        return disturb


def _is_lost(expected: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Whether a draw is NaN in most elements that have a finite value: it measures nothing."""
    finite = expected.isfinite()
    return 2 * (finite & drawn.isnan()).sum() > finite.sum()
