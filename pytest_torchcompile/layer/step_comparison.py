"""What a smoketest makes of its steps: leaf by leaf, by rounding noise, and by means where random numbers are drawn.

All of it is the oracle's: the reference, the comparison, the limits, the means. What is decided here is what is asked
of it for a model that may be spread over ranks, where every question has to be asked on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from pytest_torchcompile.layer.compiled_modules import JoinedModules, original_of
from pytest_torchcompile.layer.step_runs import RecordedStep, StepRuns
from pytest_torchcompile.layer.training_step import StepFailed, refuse_differences
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.oracle import (
    DisturbedRuns,
    Leaf,
    Limits,
    Means,
    Recording,
    Reference,
    compare,
    disturb,
    has_drawn,
    note,
    problem,
    program_unit,
    reference,
)
from pytest_torchcompile.state.tensor_forms import same_bits

__all__ = ["StepComparison"]

_UNASKED: Final = frozenset({"rng", "stride"})
"""What may differ in a smoketest: Inductor draws random numbers of its own, and lays memory out as it likes."""
_VALUES: Final = frozenset({"value", "gradient", "buffer", "mutation", "nondeterministic"})
"""What chance may explain."""
_OTHER_SEED: Final = 1000


@dataclass
class _Differences:
    """How the two runs of a step differ."""

    doubts: dict[str, str] = field(default_factory=dict)
    """What chance has to judge, by leaf."""
    wrong: list[str] = field(default_factory=list)
    """What is wrong whatever was drawn."""

    @property
    def beside_outputs(self) -> bool:
        """Whether there are doubts, and none of them about outputs or the loss."""
        about_outputs = [name for name in self.doubts if name == "loss" or name.startswith("output")]
        return bool(self.doubts) and not about_outputs


class StepComparison:
    """Judges one step after the other, and remembers what only means over many runs can judge.

    Where the model is spread over ranks, each of them calls this in the same order, as :class:`StepRuns` says.
    """

    def __init__(self, runs: StepRuns) -> None:
        self.runs, self.votes = runs, runs.votes
        self.doubts: dict[str, str] = {}
        """Leaves that differ where random numbers are drawn, or eager itself wavers: means have to judge."""
        self._differences_in_float64: list[Callable[[], _Differences]] = []
        """Of each step with doubts: what differs from what the same draws give in float64."""

    def refuse_unequal(self, step: RecordedStep) -> None:
        """Raise :class:`StepFailed` where values differ by more than noise and chance explain."""
        agreed = self.votes.run_agreed
        expected = self._expected(step)
        random = agreed(has_drawn, step.eager, step.number)
        # What was drawn decides more than rounding, so no float64 run is asked where other numbers were drawn.
        scale = partial(_assumed_reference, step) if random else expected
        found = agreed(_differences, step, scale, random)
        excused = random and found.beside_outputs
        if self.votes.any_rank(excused):
            outputs_vary = agreed(self._outputs_vary, step)
            same_draws = outputs_vary and excused
            if self.votes.any_rank(same_draws):
                # Outputs that depend on the draws agree: the same were drawn, so that chance excuses nothing else.
                # Every rank compares again, for that may run the model.
                without_excuse = agreed(_differences, step, expected, False)
                if same_draws:
                    found = without_excuse
        self.doubts = found.doubts | self.doubts
        if found.doubts:
            self._differences_in_float64.append(partial(_differences, step, expected, True))
        agreed(refuse_differences, found.wrong, step.number)

    def refuse_unequal_means(self, means: Means) -> None:
        """Raise :class:`StepFailed` where the means of many runs differ, or where they could not be made."""
        if means.error:
            raise StepFailed(means.error, "comparison")
        # Leaves that are the same in every run differ by an assumed scale, which may be off.
        fixed = self.doubts.keys() - means.random
        exact: dict[str, str] = {}
        if fixed:
            for differences in self._differences_in_float64:
                exact |= {name: text for name, text in differences().doubts.items() if name in fixed}
        wrong: list[str] = []
        for name in self.doubts:
            wrong += [texts[name] for texts in (means.differing, exact) if name in texts]
        if wrong:
            raise StepFailed(wrong[0], "comparison", evidence="\n".join(wrong))

    # what values are measured against

    def _expected(self, step: RecordedStep) -> Callable[[], Reference]:
        """What values that differ are measured against: made when it is asked for, but over ranks made for all."""
        if not self.votes.spread:
            return partial(self._float64_reference, step)
        shared = self._reference_of_ranks(step)
        return lambda: shared

    def _float64_reference(self, step: RecordedStep) -> Reference:
        assumed = _assumed_reference(step)
        runs = self.runs
        # A copy of several modules would not be what the call works on.
        if isinstance(runs.module, JoinedModules):
            return assumed
        model = original_of(runs.model)
        has_parameters = any(True for _ in runs.module.parameters())
        if runs.module is model or not has_parameters:
            with runs.as_before(step.before):
                return reference(model, step.batch, loss=runs.loss, train=runs.train, seed=step.number, tape=step.tape,
                                 draw=False)
        with runs.as_before(step.before):
            made = reference(runs.module, step.batch, loss=runs.loss, train=runs.train, seed=step.number,
                             tape=step.tape, call=model, draw=False)
            # A function may be bound to this very module, and a copy of it computes something else.
            leaves = compare(step.eager, made.twin(), assumed)
            same = not any(map(problem, leaves))
        return made if same else assumed

    def _reference_of_ranks(self, step: RecordedStep) -> Reference:
        """Such a model can't be copied: its noise is drawn by disturbed runs, which all ranks make or none."""
        agreed, any_rank = self.votes.run_agreed, self.votes.any_rank
        assumed = _assumed_reference(step)
        leaves = agreed(compare, step.eager, step.compiled, assumed)
        if not any_rank(_values_differ(leaves)):
            return assumed
        disturbed = agreed(self._disturbed_runs, step)
        leaves = agreed(compare, step.eager, step.compiled, disturbed)
        if any_rank(any(map(problem, leaves))):
            agreed(self._draw_further, disturbed, step)
        return disturbed

    def _disturbed_runs(self, step: RecordedStep) -> DisturbedRuns:
        runs = self.runs
        state = [*runs.module.parameters(), *runs.module.buffers()]
        unit = program_unit((*state, *step.batch.tensors()), step.tape.unit)

        def begin(seed: int, factor: float) -> None:
            step.before.restore()
            runs.current_batch = step.batch.clone()
            if factor:
                disturb((*state, *runs.current_batch.tensors()), seed, factor * unit)

        def run(seed: int, factor: float) -> Recording:
            try:
                self.votes.run_agreed(begin, seed, factor)
                with eager_on_purpose():
                    return runs.run_disturbed(step.number)
            finally:
                runs.current_batch = step.batch

        with runs.as_before(step.before):
            return DisturbedRuns(step.eager, run)

    def _draw_further(self, disturbed: DisturbedRuns, step: RecordedStep) -> None:
        with self.runs.as_before(step.before):
            disturbed.draw_further()

    def _outputs_vary(self, step: RecordedStep) -> bool:
        """Whether an eager run with another seed gives other outputs."""
        with self.runs.as_before(step.before):
            other = self.runs.run_eagerly(_OTHER_SEED + step.number, None)
        outputs, others = _output_tensors(step.eager), _output_tensors(other)
        return any(not same_bits(outputs[name], others[name]) for name in outputs.keys() & others.keys())


def _assumed_reference(step: RecordedStep) -> Reference:
    """A scale made from the dtype, or from that of autocast."""
    assumed = Reference(step.eager)
    assumed.unit = step.tape.unit or 0.0
    return assumed


def _differences(step: RecordedStep, expected: Callable[[], Reference], random: bool) -> _Differences:
    differences = _Differences()
    leaves = compare(step.eager, step.compiled, expected)
    # All of them are looked at together, as where draws were asked for.
    limits = Limits().over(leaves)
    for leaf in leaves:
        nondeterministic = leaf.kind == "nondeterministic"
        text = problem(leaf, limits) or (note(leaf) if nondeterministic else None)
        if text is None or leaf.kind in _UNASKED:
            continue
        if leaf.kind in _VALUES and (random or nondeterministic):
            differences.doubts[leaf.name] = text
        else:
            differences.wrong.append(text)
    return differences


def _values_differ(leaves: Iterable[Leaf]) -> bool:
    return any(leaf.kind in _VALUES and not leaf.bitwise for leaf in leaves)


def _output_tensors(recording: Recording) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, item in recording.outputs.items():
        if isinstance(item.value, torch.Tensor):
            tensors[name] = item.value
    return tensors
