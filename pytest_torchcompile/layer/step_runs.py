"""What one step of a smoketest runs: the model eagerly and compiled, on one batch and from one state, recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.gauges.replays import step_begins
from pytest_torchcompile.layer.preservation import DeepSnapshot
from pytest_torchcompile.layer.rank_votes import RankVotes
from pytest_torchcompile.layer.training_step import (
    LeftGradients,
    StepFailed,
    has_finite_values,
    left_alone,
    refuse_user_error,
)
from pytest_torchcompile.ledger import Ledger, observe
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.oracle import Held, Recording, Tape, other_values, record

__all__ = ["RecordedStep", "StepRuns"]


@dataclass(frozen=True)
class RecordedStep:
    """One step, run eagerly and compiled."""

    number: int
    """From 1 on; it is the seed too."""
    batch: Batch
    before: DeepSnapshot
    """The state that both runs began with."""
    eager: Recording
    tape: Tape
    """The eager run's operators."""
    compiled: Recording


class StepRuns:
    """Runs ``model`` for the steps of a smoketest. ``module`` holds all that the model works on.

    Where it is spread over ranks, what may raise on one alone is done in :meth:`RankVotes.run_agreed`.
    """

    def __init__(
        self, model: Callable[..., Any], module: nn.Module, batch: Batch, loss: Callable[..., Any] | None,
        votes: RankVotes, training: bool,
    ) -> None:  # fmt: skip
        """``training``: the user asks for training steps, by a loss or an optimiser."""
        self.model, self.module, self.batch = model, module, batch
        self.loss, self.votes = loss, votes
        self.current_batch = batch
        """The batch of this step."""
        self.grad_enabled = torch.is_grad_enabled()
        tensors = [*module.parameters(), *module.buffers(), *batch.tensors()]
        differentiable = any(tensor.requires_grad for tensor in tensors)
        self.train = training or (module.training and self.grad_enabled and differentiable)
        self.ledgers: list[Ledger] = []
        """One for each compiled step: the eager runs between them are none of their business."""
        self.graph_runs = 0
        """Compiled graphs that the last compiled call has run."""
        self.eager_outputs, self.compiled_outputs = Held(), Held()
        """What became of the outputs of earlier steps."""
        # CUDA graphs do overwrite the outputs of the step before.
        self._outputs_are_held = not any(tensor.is_cuda for tensor in tensors)
        self._takes_other_values = True

    def eager_step(self, number: int, before: DeepSnapshot) -> tuple[Recording, Tape]:
        """The step run eagerly. From the second on with other values, if the model takes them.

        With the same values a result that is only kept from the step before could not be told from a right one.
        """
        agreed = self.votes.run_agreed
        # In the first the user's own values are what counts.
        if number > 1 and self._takes_other_values:
            self.current_batch, tape = agreed(other_values, self.batch, number), Tape()
            eager = agreed(self.run_eagerly, number, tape)
            unusable = agreed(_is_unusable, eager)
            if not self.votes.any_rank(unusable):
                return eager, tape
            # Asked once: from here on every step has the user's values.
            self.current_batch, self._takes_other_values = self.batch, False
            agreed(before.restore)
        tape = Tape()
        eager = agreed(self.run_eagerly, number, tape)
        # Perhaps the model objects to the tape.
        if self.votes.any_rank(eager.error is not None):
            agreed(before.restore)
            eager = agreed(self.run_eagerly, number, None)
        agreed(refuse_user_error, eager.error, number, self.current_batch)
        return eager, tape

    def compiled_step(self, number: int, gradients: LeftGradients) -> tuple[Recording, Ledger]:
        """The step run compiled, and what torch.compile did meanwhile."""
        call = self._holding(self.compiled_outputs, self._call_compiled)
        with observe() as seen:
            self.ledgers.append(seen)
            compiled = self.votes.run_agreed(self._recorded, call, number, gradients)
        return compiled, seen

    def run_eagerly(self, seed: int, mode: Any) -> Recording:
        """One eager run, whose outputs are held until the next."""
        with eager_on_purpose():
            return self._recorded(self._holding(self.eager_outputs, self._call), seed, mode, eager=True)

    def run_disturbed(self, seed: int) -> Recording:
        """One eager run of a disturbed model; what earlier runs returned is no concern of it."""
        with eager_on_purpose():
            return self._recorded(self._call, seed, None)

    def run_again_compiled(self, seed: int) -> Recording:
        """One compiled run for its values alone."""
        return self._recorded(self._call_compiled, seed, None)

    def call_compiled_again(self) -> None:
        """One compiled call of the user's batch, of which nothing is recorded but :attr:`graph_runs`."""
        batch = self.votes.run_agreed(self.batch.clone)
        with observe() as seen:
            self.ledgers.append(seen)
            try:
                with torch.set_grad_enabled(self.grad_enabled or self.train):
                    self._call_compiled(*batch.args, **batch.kwargs)
            except Exception as error:
                # The others have to hear of it before any vote.
                self._wait_for_ranks(error, 0)
                raise
        self.votes.reshard()
        self._wait_for_ranks(None, 0)

    @contextmanager
    def as_before(self, before: DeepSnapshot) -> Iterator[None]:
        """Run a block in an earlier state of the module, and put back the present one."""
        after = self.votes.run_agreed(DeepSnapshot, self.module)
        self.votes.run_agreed(before.restore)
        try:
            yield
        finally:
            after.restore()

    def _holding(self, outputs: Held, call: Callable[..., Any]) -> Callable[..., Any]:
        if self._outputs_are_held:
            return outputs.keep_outputs(call)
        return call

    def _recorded(self, call: Callable[..., Any], seed: int, mode: Any, eager: bool = False) -> Recording:
        """Record a call, and wait until the other ranks have ended theirs, whatever came of it."""
        outcome: Recording | Exception
        try:
            outcome = record(call, self.module, self.current_batch, loss=self.loss, train=self.train, seed=seed,
                             mode=mode, rest=False)
        except UsageError as error:
            # A loss that is no single number.
            outcome = StepFailed(str(error), "loss", seed, user_error=error)
        except Exception as error:
            outcome = error
        finally:
            # Not collective, so that it may come before the other ranks are waited for.
            self.votes.reshard()
        self._wait_for_ranks(_raised_in(outcome), seed, eager)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _wait_for_ranks(self, raised: BaseException | None, step: int, eager: bool = False) -> None:
        """Wait for the other ranks after a call; no vote of ours may come between the collectives of theirs."""
        missing = self.votes.missing_after_call(raised is not None, eager)
        if missing:
            raise left_alone(raised, missing, self.votes.departed, step) from raised

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        # record() without a backward pass switches gradients off.
        with torch.set_grad_enabled(self.grad_enabled or self.train):
            return self.model(*args, **kwargs)

    def _call_compiled(self, *args: Any, **kwargs: Any) -> Any:
        step_begins()
        ledger = self.ledgers[-1]
        before = ledger.graph_runs
        try:
            return self._call(*args, **kwargs)
        finally:
            # Graphs that this call compiles are in the list by now.
            self.graph_runs = ledger.graph_runs - before


def _is_unusable(eager: Recording) -> bool:
    return eager.error is not None or not has_finite_values(eager)


def _raised_in(outcome: Recording | Exception) -> BaseException | None:
    if isinstance(outcome, Exception):
        return outcome
    if outcome.error is not None:
        return outcome.error.exception
    return None
