"""What a smoketest makes of its steps: leaf by leaf, by rounding noise, and by means where random numbers are drawn.

A model that is spread over ranks can't be copied and widened to float64, as a reference is otherwise made. But it can
be run again with each parameter, buffer and input changed by about one rounding: every operator behind rounds anew, and
what that does to the results is their noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from pytest_torchcompile.layer.compiled_modules import JoinedModules, original_of
from pytest_torchcompile.layer.mean_comparison import Means, has_drawn
from pytest_torchcompile.layer.step_runs import RecordedStep, StepRuns
from pytest_torchcompile.layer.training_step import StepFailed, refuse_differences
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.oracle import Recording, Reference, compare, note, problem, reference
from pytest_torchcompile.oracle.leaf_limits import Leaf
from pytest_torchcompile.oracle.operator_rounding import program_unit
from pytest_torchcompile.oracle.reference_runs import DRAWS, FEW
from pytest_torchcompile.state.value_leaves import same_bits

__all__ = ["Disturbed", "StepComparison", "disturb"]

ALL = DRAWS[-1]
"""Draws after a suspicion. At first there are FEW: after one draw alone, more would need a vote of all ranks."""
_SEED_STRIDE = 7919
"""Between the seeds of two tensors; a prime, so that those of another draw are others."""


class Disturbed(Reference):
    """Eager itself, and noise drawn by disturbed eager runs.

    ``run(seed, factor)`` makes one, with ``factor`` times the noise of one rounding; with 0 it is the plain run again.
    It is collective, so draws are made when all ranks ask for them, not when a comparison does.
    """

    def __init__(self, eager: Recording, run: Callable[[int, float], Recording]) -> None:
        super().__init__(eager)
        self.kind, self.why = "eager-draws", "the model is spread over ranks"
        self._run = run
        # Undisturbed: what it does otherwise than the first run is no noise of rounding.
        self._twin = run(0, 0.0)
        self._draw(FEW, 1)

    def draw_further(self) -> None:
        """Draw more, half of it with twice the noise, so that decisions on a knife's edge are seen to flip."""
        self._draw(ALL - FEW, 2)

    def twin(self) -> Recording:
        """A second eager run from the same state and seed."""
        return self._twin

    def _draw(self, count: int, most: int) -> None:
        """Make so many draws; their factors go round from 1 to ``most``."""
        for number in range(count):
            factor = 1.0 + number % most
            drawn = self._run(self.draws + number + 1, factor)
            # A draw that raises says nothing of the noise.
            if drawn.error is not None:
                continue
            values = {name: value for name, _, value in drawn.values()}
            for name, estimate in self.estimates.items():
                estimate.add(values.get(name), plain=factor == 1)
        self.draws += count


@torch.no_grad()
def disturb(tensors: Iterable[torch.Tensor], seed: int, unit: float) -> None:
    """Multiply each element by a factor within ``2 * unit`` of 1, in place; one unit would be rounded away.

    What is replicated on several ranks stays equal on them: the factors depend on the seed, a tensor's number and its
    shape. Of a distributed tensor the local part is changed.
    """
    for number, tensor in enumerate(tensors):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if not _can_be_disturbed(local):
            continue
        generator = torch.Generator(local.device).manual_seed(seed + _SEED_STRIDE * number)
        dtype = local.dtype.to_real() if local.is_complex() else local.dtype
        factor = torch.rand(local.shape, generator=generator, device=local.device, dtype=dtype)
        local.mul_(factor.mul_(4).sub_(2).mul_(unit).add_(1))


def _can_be_disturbed(tensor: torch.Tensor) -> bool:
    """Numbers with a fraction, of more than one byte: narrower ones have no kernels for this."""
    if tensor.layout is not torch.strided or tensor.dtype.itemsize == 1:
        return False
    return tensor.is_floating_point() or tensor.is_complex()


# ----------------------------------------------------------------------------------------------------------- comparison
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
        disturbed = agreed(self._disturbed, step)
        leaves = agreed(compare, step.eager, step.compiled, disturbed)
        if any_rank(any(map(problem, leaves))):
            agreed(self._draw_further, disturbed, step)
        return disturbed

    def _disturbed(self, step: RecordedStep) -> Disturbed:
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
            return Disturbed(step.eager, run)

    def _draw_further(self, disturbed: Disturbed, step: RecordedStep) -> None:
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
    for leaf in compare(step.eager, step.compiled, expected):
        nondeterministic = leaf.kind == "nondeterministic"
        text = problem(leaf) or (note(leaf) if nondeterministic else None)
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
