"""The steps of a smoketest: each runs eagerly and compiled from one state, is judged, and is gone on from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.layer.mean_comparison import Means, compare_means
from pytest_torchcompile.layer.preservation import DeepSnapshot
from pytest_torchcompile.layer.rank_votes import RankVotes
from pytest_torchcompile.layer.step_checks import (
    StepFailed,
    compiler_failure,
    has_answers,
    refuse_eager_parts,
    refuse_not_finite,
    refuse_overwritten,
)
from pytest_torchcompile.layer.step_comparison import StepComparison
from pytest_torchcompile.layer.step_runs import RecordedStep, StepRuns
from pytest_torchcompile.layer.training_step import LeftGradients, OptimizerStep, adapted_loss
from pytest_torchcompile.ledger import Ledger, observe
from pytest_torchcompile.oracle import Fault, Recording

__all__ = ["Steps"]


def _nothing_noted() -> None:
    """Nobody notes failures: what fails compiled is raised."""


class Steps:
    """The loop of a smoketest over one batch. ``module`` holds all that ``model`` and the optimiser work on.

    Where the model is spread over ranks, each of them does the same calls in the same order, whatever it finds. What
    may raise on one alone is done in :meth:`RankVotes.run_agreed`, and each condition of a call is a vote. That goes
    for our own work between the calls too: memory may be short on one rank, an object of the model's unreadable.
    """

    def __init__(
        self, model: Callable[..., Any], module: nn.Module, batch: Batch, optimizer: Any,
        loss_fn: Callable[..., Any] | None, votes: RankVotes,
    ) -> None:  # fmt: skip
        self.module, self.votes = module, votes
        loss = None if loss_fn is None else adapted_loss(loss_fn)
        training = optimizer is not None or loss_fn is not None
        self.runs = StepRuns(model, module, batch, loss, votes, training)
        self.comparison = StepComparison(self.runs)
        self.optimizer_step = OptimizerStep(module, optimizer)
        self.noted: Callable[[], BaseException | None] = _nothing_noted
        """What failed compiled and was run eagerly instead, as other ranks were waiting."""
        self.notes: dict[str, None] = {}
        self.backward = False
        """Whether a step had a backward pass."""
        self.averaged = 0
        """Over how many runs means were compared; 0: every value was."""
        self._answered = False
        """Whether a step gave anything but zeros."""

    def run(self, number: int) -> None:
        """One step. Raises :class:`StepFailed`, or :class:`~.rank_votes.FailedElsewhere`."""
        agreed, runs = self.votes.run_agreed, self.runs
        before = agreed(DeepSnapshot, self.module)
        eager, tape = runs.eager_step(number, before)
        # Asked before the compiled run, which would change what is held as well.
        held_eagerly = agreed(runs.eager_outputs.changes_by, eager)
        agreed(self._refuse_useless_loss, eager, number)
        # Back to the state that eager began with.
        agreed(before.restore)
        gradients = LeftGradients(self.module)
        compiled, seen = runs.compiled_step(number, gradients)
        agreed(self._refuse_eager_parts, compiled, seen, number)
        step = RecordedStep(number, runs.current_batch, before, eager, tape, compiled)
        self.comparison.refuse_unequal(step)
        agreed(self._refuse_overwritten, held_eagerly, step)
        agreed(refuse_not_finite, compiled, runs.train, number)
        agreed(self._note_answers, compiled)
        # The next step goes on from the compiled gradients, as training would.
        if compiled.backward:
            self.backward = True
            agreed(self.optimizer_step.take, gradients, eager, number)

    def finish(self) -> None:
        """What can be told only after the last step. Raises as :meth:`run`."""
        agreed = self.votes.run_agreed
        agreed(self._refuse_silence)
        agreed(self._refuse_fallback)
        # Many runs more, so only where values alone did not decide.
        doubtful = bool(self.comparison.doubts)
        if not self.votes.any_rank(doubtful):
            return
        means = self._compared_means()
        agreed(self.comparison.refuse_unequal_means, means)
        self.averaged = means.runs
        self.notes[f"draws random numbers, or is not deterministic: compared by the means of {means.runs} runs"] = None

    def _compared_means(self) -> Means:
        agreed, runs = self.votes.run_agreed, self.runs
        before = agreed(DeepSnapshot, self.module)
        # The user's own values again: kept results are no concern of means.
        runs.current_batch = runs.batch

        def eager(seed: int) -> Recording:
            agreed(before.restore)
            return runs.run_eagerly(seed, None)

        def compiled(seed: int) -> Recording:
            agreed(before.restore)
            return runs.run_again_compiled(seed)

        with observe() as seen:
            runs.ledgers.append(seen)
            return compare_means(eager, compiled, self.votes.any_rank)

    def _refuse_useless_loss(self, eager: Recording, step: int) -> None:
        if self.optimizer_step.is_users and not eager.backward:
            raise StepFailed("the loss does not depend on anything that requires a gradient, eagerly too", "loss", step)

    def _refuse_eager_parts(self, compiled: Recording, seen: Ledger, step: int) -> None:
        if compiled.error is not None:
            raise compiler_failure(compiled.error, step)
        error = self.noted()
        if error is not None:
            raise compiler_failure(Fault.of(error, "compiled code"), step)
        refuse_eager_parts(seen, self.runs.graph_runs, step)
        if seen.graph_breaks:
            self.notes[f"{len(seen.graph_breaks)} graph break(s)"] = None

    def _refuse_overwritten(self, held_eagerly: dict[str, str], step: RecordedStep) -> None:
        held_compiled = self.runs.compiled_outputs.changes_by(step.compiled)
        refuse_overwritten(held_eagerly, held_compiled, step.number)

    def _note_answers(self, compiled: Recording) -> None:
        self._answered = self._answered or has_answers(compiled)

    def _refuse_silence(self) -> None:
        if not self._answered:
            raise StepFailed("every output and every gradient is zero or not finite: that they agree proves nothing",
                             "comparison")

    def _refuse_fallback(self) -> None:
        """A model that falls back to eager by itself hides why: a backward pass that failed, a graph that raised."""
        self.runs.call_compiled_again()
        if not self.runs.graph_runs:
            raise StepFailed("after the last step nothing ran compiled any more: it has fallen back to eager",
                             "forward")
