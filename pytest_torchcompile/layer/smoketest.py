"""CompileSmoketest: does this compiled model train, or serve, as it would uncompiled? Asked before it is used.

Its steps each run eagerly and compiled from one state, are judged, and are gone on from.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.layer.compiled_modules import join_modules
from pytest_torchcompile.layer.preservation import DeepSnapshot, preserved
from pytest_torchcompile.layer.rank_votes import FailedElsewhere, RankVotes
from pytest_torchcompile.layer.sample_batch import batch_for
from pytest_torchcompile.layer.step_comparison import StepComparison
from pytest_torchcompile.layer.step_runs import RecordedStep, StepRuns
from pytest_torchcompile.layer.training_step import (
    LeftGradients,
    OptimizerStep,
    StepFailed,
    adapted_loss,
    compiler_failure,
    refuse_differences,
    refuse_eager_parts,
    refuse_not_finite,
)
from pytest_torchcompile.ledger import Ledger, observe
from pytest_torchcompile.oracle import Fault, HeldName, Means, Recording, compare_means, overwritten_outputs

__all__ = ["CompileSmoketest", "SmoketestResult", "Steps"]


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
        held_eagerly = agreed(runs.eager_outputs.changes_by, eager, f"step {number}")
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

    def _refuse_overwritten(self, held_eagerly: dict[HeldName, str], step: RecordedStep) -> None:
        this = f"step {step.number}"
        held_compiled = self.runs.compiled_outputs.changes_by(step.compiled, this)
        refuse_differences(overwritten_outputs(held_eagerly, held_compiled, this), step.number)

    def _note_answers(self, compiled: Recording) -> None:
        self._answered = self._answered or compiled.has_answers

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


# ----------------------------------------------------------------------------------------------------- CompileSmoketest
@dataclass(frozen=True)
class SmoketestResult:
    """What a smoketest found."""

    ok: bool
    reason: str
    """One line: what failed, or what was seen to work."""
    phase: str = ""
    """Where it failed: ``forward``, ``loss``, ``backward``, ``step``, ``comparison``, ``state`` (around the run), or
    ``rank`` (on another rank)."""
    step: int = 0
    """In which step, from 1 on; 0: before the first."""
    seconds: float = 0.0
    """Wall seconds of the whole test, compilation among them."""
    graphs: int = 0
    """Compiled graphs that ran."""
    compiles: int = 0
    """Compilations during the test: 0 for a model that was warm."""
    evidence: str = ""
    """The stack of what was raised, or the leaves that differ, one a line."""
    ranks: tuple[int, ...] = ()
    """The ranks on which it failed, if they are others than this one."""
    notes: tuple[str, ...] = ()
    """What does not fail the test and is worth knowing: graph breaks, parts that ran eagerly, how it was compared."""
    user_error: BaseException | None = field(default=None, repr=False)
    """What the model, the loss or the optimiser raises without torch.compile too: not the compiler's fault."""


class CompileSmoketest:
    """Runs a compiled model for a few steps beside itself uncompiled, on the real device, dtype and wrapper.

    >>> compiled = torch.compile(torch.nn.Linear(4, 2), backend="eager")
    >>> CompileSmoketest(steps=2).run(compiled, torch.randn(3, 4))
    True
    """

    def __init__(self, steps: int = 3) -> None:
        """``steps``: 1 to 3. From the second on the batch has other values, if the model takes them. With CUDA graphs
        the third is the first that replays one.

        Raises :class:`ValueError` for another number.
        """
        if steps not in (1, 2, 3) or isinstance(steps, bool):
            raise ValueError(f"steps={steps!r}: expected 1, 2 or 3")
        self.steps = steps
        self.last_result: SmoketestResult | None = None
        """What the last :meth:`run` found; None before the first."""
        self.noted: Callable[[], BaseException | None] | None = None
        """Asked for what failed compiled and was run eagerly instead, by whoever handed out the compiled model."""
        self.apart = False
        """After a :meth:`run`: the ranks of the model are no longer at the same place (:mod:`.rank_votes`)."""

    def run(
        self,
        model: Callable[..., Any],
        sample_batch: Any,
        optimizer: Any = None,
        loss_fn: Callable[..., Any] | None = None,
    ) -> bool:
        """Whether compiled code ran, computed in each step what eager computes, and everything was finite.

        A step is forward, loss, backward, ``optimizer.step()`` and ``zero_grad()``. It is run eagerly as well (under
        ``torch.compiler.set_stance("force_eager")``, so every wrapper stays in place). Outputs, loss, gradients
        and buffers must agree up to the rounding noise of this very program; where it draws random numbers, their means
        over many runs must. With neither an optimiser nor a loss, a model in evaluation mode, or one in which nothing
        requires a gradient, does a forward pass in the caller's grad mode.

        Of a model that is spread over ranks (DDP, FSDP, tensor parallel) every rank must call this, and all get the
        same answer: one that fails says why, the others which rank it was. A part that does not compile on one rank
        runs eagerly there meanwhile, so that no rank is left waiting; what raises while it runs can't be helped so
        unless the model is tried by ``maybe_compile``. What the model itself raises on one rank while others are in the
        middle of its collectives is the answer there, after half a minute; the others wait until that rank's process
        ends or the process group's time-out, which is all that can be done without taking the group apart.

        Nothing remains of the test but compiled code: parameters, buffers, gradients, the optimiser, training flags
        and all random states are afterwards what they were, whatever happened. It needs memory for two more copies of
        the model.

        Args:
            model: What ``torch.compile`` or ``maybe_compile`` returned, also wrapped in DDP or compiled in parts.
            sample_batch: A tensor, a tuple of positional or a dict of keyword arguments; see :class:`Batch`. A dict is
                the argument itself where the model takes one, and no key by its name. It is not written to.
            optimizer: Its steps are real, and undone. None: small steps of plain gradient descent.
            loss_fn: ``loss_fn(output, sample_batch)`` or ``loss_fn(output)``; of a tuple that it returns the first
                element is the loss. None: a weighted mean of y^2 + y over every floating output.

        Returns:
            False for whatever fails, and for a model that is not compiled; nothing is raised for the model's
            sake. :attr:`last_result` says why, and holds the exception where eager raises too.
        """
        started = time.perf_counter()
        steps: Steps | None = None
        step, self.apart = 0, False
        training = optimizer is not None or loss_fn is not None
        try:
            module = join_modules(model, loss_fn, loose=_optimized_parameters(optimizer))
            votes = RankVotes(module)
            agreed = votes.run_agreed
            batch = agreed(_usable_batch, model, module, sample_batch)
            with ExitStack() as around:
                around.enter_context(_gradients_possible(training))
                agreed(_enter, around, preserved, module, optimizer)
                around.enter_context(observe())
                around.enter_context(self._eager_where_uncompiled(votes))
                steps = agreed(Steps, model, module, batch, optimizer, loss_fn, votes)
                if self.noted is not None:
                    steps.noted = self.noted
                for number in range(1, self.steps + 1):
                    # Known outside, should it fail on another rank.
                    step = number
                    steps.run(number)
                steps.finish()
            result = SmoketestResult(True, _praise(self.steps, steps))
        except StepFailed as why:
            result = SmoketestResult(False, why.reason, why.phase, why.step, evidence=why.evidence,
                                     user_error=why.user_error)
        except FailedElsewhere as why:
            result = SmoketestResult(False, str(why), "rank", step, ranks=why.ranks)
        except Exception as error:
            result = _own_failure(error)
        self.apart = steps is not None and steps.votes.diverged
        self.last_result = replace(result, seconds=time.perf_counter() - started, **_counts(steps))
        return result.ok

    def _eager_where_uncompiled(self, votes: RankVotes) -> AbstractContextManager[object]:
        """Where other ranks wait, torch itself is asked to run eagerly what does not compile. The ledger sees it."""
        if not votes.spread or self.noted is not None:
            return nullcontext()
        import torch._dynamo

        return torch._dynamo.config.patch(suppress_errors=True)  # type: ignore[no-any-return]


def _own_failure(error: Exception) -> SmoketestResult:
    text = f"the smoketest could not be run: {type(error).__name__}: {error}"
    result = SmoketestResult(False, text, "state", evidence=traceback.format_exc())
    first = error.__context__
    if isinstance(first, StepFailed) and first.user_error is not None:
        # What was on its way when the state could not be put back: FSDP1 in the middle of a call, say.
        return replace(result, reason=f"{first.reason}; then {text}", phase=first.phase, user_error=first.user_error)
    return result


def _enter(around: ExitStack, make: Callable[..., AbstractContextManager[object]], *args: Any) -> None:
    around.enter_context(make(*args))


def _optimized_parameters(optimizer: Any) -> tuple[torch.Tensor, ...]:
    if optimizer is None:
        return ()
    parameters: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return tuple(parameters)


def _gradients_possible(training: bool) -> AbstractContextManager[object]:
    """Leave inference mode for a training step; what was made inside of it could have no gradient."""
    if training and torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return nullcontext()


def _usable_batch(model: Callable[..., Any], module: nn.Module, sample_batch: Any) -> Batch:
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise StepFailed("it has parameters that are not initialised yet: call it once before it is compiled", "state")
    return batch_for(model, sample_batch)


def _praise(count: int, steps: Steps) -> str:
    what = "forward, loss, backward and step" if steps.backward else "forward"
    how = f" on average over {steps.averaged} runs, as random numbers differ" if steps.averaged else ""
    return f"{count} step(s) of {what} ran compiled and agree with eager{how}"


def _counts(steps: Steps | None) -> dict[str, Any]:
    """The fields of the result that count what was compiled and ran."""
    if steps is None:
        return {}
    ledgers = steps.runs.ledgers
    graphs: set[str] = set()
    compiles = 0
    for seen in ledgers:
        compiles += len(seen.compiles)
        # One that never ran has proven nothing.
        graphs.update(graph.compile_id for graph in seen.graphs if graph.runs)
    return {"graphs": len(graphs), "compiles": compiles, "notes": tuple(steps.notes)}
