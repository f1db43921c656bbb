"""Trained steps: the steps of SGD of a trial, made by each side from the same state, and compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.ledger import Ledger
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.oracle.calls import Call, Side
from pytest_torchcompile.oracle.expected import Reference
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.oracle.recording import Fault, Recording
from pytest_torchcompile.oracle.reference_runs import reference
from pytest_torchcompile.oracle.spread import Spread
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.oracle.training import (
    Training,
    no_loss,
    parameters_told_by_gradients,
    rename_leaves,
    steps_of,
)
from pytest_torchcompile.oracle.trial_account import EAGER, TrialAccount

__all__ = ["run_training"]


@dataclass(frozen=True)
class _PlannedTraining:
    """Steps of training that each side makes, from the same state."""

    calls: list[Call]
    """One for each step."""
    label: str
    accumulated: bool
    """Does the last step add to the gradients of the step before?"""


@dataclass(frozen=True)
class _EagerTraining:
    """The steps as the eager side makes them."""

    recording: Recording
    one_process: Recording | None
    """The same by one process, where there are several."""

    @property
    def errors(self) -> list[Fault]:
        """What they have raised."""
        runs = (self.recording, self.one_process)
        return [run.error for run in runs if run is not None and run.error is not None]


def run_training(trial: TrialAccount, eager: Side, compiled: Side, ledger: Ledger) -> None:
    """Make the steps on both sides and compare what came of them, into ``trial.trained``."""
    plan = _plan_training(trial, eager)
    with trial.phase("training"):
        trained = _train_eagerly(trial, plan, eager, ledger)
        if trained.errors and plan.accumulated:
            # Torch adds up no sparse gradients of half precision on a CPU (torch 2.13).
            plan = replace(plan, accumulated=False)
            # These are other steps, and need a tape of their own.
            trial.tapes.pop(plan.label, None)
            trained = _train_eagerly(trial, plan, eager, ledger)
        # What eager raises here is no problem of the compiled side: there is nothing to compare.
        if trained.errors:
            trial.untrained = str(trained.errors[0])
            return
        with ledger.during(plan.label), trial.numbers_drawn():
            compiled_recording = _train(trial, plan, compiled, None)
        if raised := compiled_recording.error:
            trial.compiled.error = replace(raised, phase=f"{raised.phase}, in {plan.label}")
            return
        trial.check_numbers()
    with trial.phase("compare"), ledger.during(EAGER):
        _compare_training(trial, plan, trained.one_process, trained.recording, compiled_recording)


def _plan_training(trial: TrialAccount, eager: Side) -> _PlannedTraining:
    # From the first pass: the second has other values.
    calls = [passed.call for passed in trial.passed[:len(trial.calls)] if not passed.raised]
    # Over several ranks nothing is accumulated: they average, and a pipeline scales, what is there before the
    # backward pass too.
    accumulated = trial.one_process is None and type(eager.spread) is Spread
    chosen = [calls[number % len(calls)] for number in range(trial.steps)]
    return _PlannedTraining(chosen, f"{trial.steps} training steps", accumulated)


def _train_eagerly(trial: TrialAccount, plan: _PlannedTraining, eager: Side, ledger: Ledger) -> _EagerTraining:
    """Make the steps eagerly. Raises what is our own mistake, as it is."""
    with ledger.during(EAGER), eager_on_purpose():
        one_process = _train_in_one_process(trial, plan, eager.spread)
        with trial.numbers_given():
            recording = _train(trial, plan, eager, trial.new_tape(plan.label))
    trained = _EagerTraining(recording, one_process)
    for error in trained.errors:
        error.raise_own_mistake()
    return trained


def _train(trial: TrialAccount, plan: _PlannedTraining, side: Side, tape: Tape | None,
           silent: frozenset[str] = frozenset()) -> Recording:
    side.restore()
    training = Training(side.module, side.call, trial.loss, trial.rate, trial.replayed, side.spread, silent,
                        plan.accumulated)
    steps = steps_of(call.batch_for(side.spread) for call in plan.calls)
    return record(training, training, steps, loss=no_loss, seed=trial.seed, mode=tape, spread=side.spread)


def _train_in_one_process(trial: TrialAccount, plan: _PlannedTraining, ranks: Spread) -> Recording | None:
    """The same steps as one process makes them, without what is not on this rank; None where there is one only."""
    if trial.one_process is None:
        return None
    elsewhere = ranks.names_elsewhere
    return _train(trial, plan, trial.one_process, trial.new_tape(plan.label), elsewhere).without(elsewhere)


def _compare_training(trial: TrialAccount, plan: _PlannedTraining, one_process: Recording | None, eager: Recording,
                      compiled: Recording) -> None:
    all_replicas = steps_of(call.batch_of_all for call in plan.calls)

    def expected() -> Reference:
        return _training_reference(trial, plan, all_replicas)

    if one_process is not None:
        for about, leaf in trial.beside_one_process(plan.label, one_process, eager, expected):
            trial.trained += [(about, leaf) for leaf in rename_leaves([leaf], trial.steps)]
    judged = trial.judged.leaves_of_first_step(plan.calls[0].index, eager, compiled)
    without = parameters_told_by_gradients((eager, compiled), trial.pristine, trial.rate)
    leaves = trial.compare_recordings(eager, compiled, expected, plan.label, all_replicas, judged, without)
    trial.trained += [(plan.label, leaf) for leaf in rename_leaves(leaves, trial.steps)]


def _training_reference(trial: TrialAccount, plan: _PlannedTraining, batch: Batch) -> Reference:
    trial.options.begin_again()
    training = Training(trial.pristine, None, trial.loss, trial.rate, accumulated=plan.accumulated)
    of_numbers, around = trial.numbers_of_reference()
    tape = trial.tapes[plan.label]

    def make() -> Reference:
        return reference(training, batch, loss=no_loss, seed=trial.seed, tape=tape, unit=trial.unit, draw=False,
                         kept={}, around=around)

    with trial.phase("reference"):
        return trial.options.references.get(trial.options.key, (plan.label, trial.unit, *of_numbers), make)
