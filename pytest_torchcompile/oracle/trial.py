"""Trial: one program run eagerly and compiled, call by call, all compared: a cell of a matrix, or ``compare()``."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from pytest_torchcompile.backends import promised
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.ledger import Ledger, observe
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.ledger.records import Text
from pytest_torchcompile.oracle.calls import (
    Call,
    EagerCall,
    Make,
    Passed,
    Side,
    TrialOptions,
    Variants,
    passes_over,
)
from pytest_torchcompile.oracle.comparison import compare
from pytest_torchcompile.oracle.expected import Reference, memory_behind
from pytest_torchcompile.oracle.held import held_leaves
from pytest_torchcompile.oracle.judged_calls import JudgedCalls
from pytest_torchcompile.oracle.leaf_limits import Leaf
from pytest_torchcompile.oracle.properties import has_drawn, labels_with_other_draws
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.oracle.recording import Fault, Recording
from pytest_torchcompile.oracle.reference_runs import reference
from pytest_torchcompile.oracle.spread import Spread
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.oracle.training import (
    Training,
    learning_rate,
    no_loss,
    parameters_told_by_gradients,
    rename_leaves,
    steps_of,
)
from pytest_torchcompile.state.model_copy import copy_model
from pytest_torchcompile.state.torch_state import SettingsSnapshot

__all__ = ["Compiled", "Trial"]

# Kinds of leaves in which a part of a model may differ from the whole.
_LAYOUT = frozenset({"stride", "alias", "requires_grad", "rng"})
# What the ledger calls everything that isn't the compiled side's doing.
_EAGER = "eager run"


@dataclass
class Compiled:
    """What instruments saw of the compiled side."""

    seen: dict[str, Any] = field(default_factory=dict)
    coverage: list[dict[str, Any]] = field(default_factory=list)
    """Per call, where it was asked for: the share of the model's operator calls that ran inside compiled graphs."""
    error: Fault | None = None
    """What ended the run."""


@dataclass(frozen=True)
class _PlannedTraining:
    """Steps of training that each side makes, from the same state."""

    calls: list[Call]
    """One for each step."""
    label: str
    accumulated: bool
    """Does the last step add to the gradients of the step before?"""


class Trial:
    """One program, its calls, and what came of them. :meth:`run` once, then read.

    Each call is run on both sides and compared before the next, so that two recordings are in memory, not all.
    """

    def __init__(self, make: Make, pristine: torch.nn.Module, settings: dict[str, Any], calls: Sequence[Call],
                 options: TrialOptions | None = None) -> None:
        """Take what is run, and how.

        Args:
            make: Makes the sides.
            pristine: The model in its initial state, for references: never run, never changed.
            settings: Of ``torch.compile``.
            calls: In their order.
            options: How they are run, and what is compared.
        """
        self.make, self.pristine, self.settings, self.calls = make, pristine, settings, list(calls)
        self.options = options or TrialOptions()
        self.loss, self.train, self.steps = self.options.loss, self.options.train, self.options.steps
        self.seed, self.unit, self.root = self.options.seed, self.options.unit, self.options.root
        self.compared = self.options.compared
        self.wrapping = "none"  # how the model is wrapped, for what is said of it
        # Runs the model as one process does, where the sides are spread over ranks.
        self._one_process: Side | None = None
        # Graphs and generated code, where they are kept.
        self.texts: list[Text] = []
        self.seconds: dict[str, float] = {}
        self.compiled = Compiled()
        self.passed: list[Passed] = []
        # What was compared in the calls, and in the training, each with its label.
        self.leaves: list[tuple[str, Leaf]] = []
        self.trained: list[tuple[str, Leaf]] = []
        tensors = (tensor for call in self.calls for tensor in call.batch.tensors())
        self.options.references.make_room(memory_behind(tensors))
        self.tapes: dict[Hashable, Tape] = {}
        self._variants = Variants(pristine)
        # The compiled side, from the beginning of the run on: a check may go on with what was compiled.
        self.side: Side | None = None
        # Settings of torch that the model changes, eagerly too; they were put back.
        self.leaks: list[str] = []
        self._judged = JudgedCalls()
        self.rate, self.draws = 0.0, False  # of the training, 0: nothing to train; does the model draw random numbers?
        # Do CUDA graphs run? Each call then writes to the memory of the one before, as torch documents: what is kept
        # of a call is a copy, and outputs that somebody holds are not looked at again.
        self.replayed = promised(settings) and any(call.batch.is_on_cuda for call in self.calls)

    def run(self) -> None:
        """Run everything on both sides and compare. Raises EagerRaised; see ``may_raise``."""
        with self.phase("build"):
            # None serves the other: a model may count its calls or keep tensors in Python.
            eager, compiled = self.make(None), self.make(dict(self.settings))
            if self.options.one_process is not None:
                self._one_process = self.options.one_process()
        self.side = compiled
        instrument = self.options.instrument or nullcontext
        with observe(root=self.root, keep_texts=self.options.keep_texts) as ledger, instrument(ledger):
            self.texts = ledger.texts
            self._run_calls(eager, compiled, ledger)
            if self.steps > 1 and self.train and self.rate and self.compiled.error is None:
                self._run_training(eager, compiled, ledger)
            if self.options.covered and self.compiled.error is None:
                with self.phase("coverage"):
                    self.compiled.error = self._cover_calls(eager, compiled, ledger)
        self.compiled.seen = seen = ledger.to_dict(self.root or Path.cwd())
        seen["eager_frames"] = [frame for frame in seen["eager_frames"] if frame["during"] != _EAGER]
        if labels_with_other_draws([*self.leaves, *self.trained]):
            # Rare: only then the statistics of random numbers are loaded.
            from pytest_torchcompile.oracle.other_draws import judge_other_draws

            judge_other_draws(self, eager, compiled)

    def again(self, settings: dict[str, Any]) -> Trial:
        """The same trial, not yet run, with other settings of ``torch.compile``."""
        return Trial(self.make, self.pristine, settings, self.calls, self.options.unwatched())

    def in_evaluation(self) -> Trial:
        """The same trial, not yet run, of the model in evaluation; one pass over the calls."""
        def make(settings: dict[str, Any] | None) -> Side:
            return self.make(settings).begin_in_evaluation()

        key = (*self.options.key, "evaluation")
        options = replace(self.options.unwatched(), passes=1, in_evaluation=False, key=key)
        return Trial(make, copy_model(self.pristine).eval(), self.settings, self.calls, options)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall seconds of a block to the phase ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _run_calls(self, eager: Side, compiled: Side, ledger: Ledger) -> None:
        planned_passes = passes_over(self.calls, self.seed if self.options.varied else None)
        for number, calls in enumerate(islice(planned_passes, self.options.passes)):
            for planned in calls:
                done = self._run_eagerly(eager, planned, ledger)
                graph_runs = ledger.graph_runs
                settings = SettingsSnapshot()
                # Only the first pass compiles.
                with self.phase("steady" if number else "compiled"), ledger.during(done.call.label):
                    recording, held = compiled.run(done.call, self.loss, self.train, self.seed)
                self._compare_settings(done, settings.restore())
                if recording.error and not done.recording.error:
                    self.compiled.error = recording.error
                    return
                if not self.compared:
                    continue
                self.passed.append(done.passed_with(recording, ledger.graph_runs - graph_runs))
                if self.steps > 1 and not self.rate:
                    self.rate = learning_rate((self._one_process or eager).module, done.one_process or done.recording)
                with self.phase("compare"), ledger.during(_EAGER):
                    self._compare_call(done, recording, eager.spread)
                    if not self.replayed:
                        self.leaves += held_leaves(done.held, held, done.call.label)

    def _run_eagerly(self, side: Side, call: Call, ledger: Ledger) -> EagerCall:
        """Run a call eagerly, and also by one process if there are several."""
        settings = SettingsSnapshot()
        first = self._one_process or side
        one_process = None
        with self.phase("eager"), ledger.during(_EAGER), eager_on_purpose():
            tape = self.new_tape((call.index, call.other))
            recording, held = first.run(call, self.loss, self.train, self.seed, tape)
            if recording.error and call.other is not None and not self.passed[call.index].raised:
                # The model does not take the other values.
                call = replace(self.calls[call.index], suffix=call.suffix)
                recording, held = first.run(call, self.loss, self.train, self.seed)
            self._check_eager(call, recording)
            if first is not side:
                one_process = recording
                recording, held = side.run(call, self.loss, self.train, self.seed)
        changes = settings.restore()
        self._check_eager(call, recording)
        self.draws = self.draws or has_drawn(recording, self.seed + call.index)
        return EagerCall(call, recording, held, one_process, changes)

    def _check_eager(self, call: Call, eager: Recording) -> None:
        """Raise EagerRaised for what the model raises, where it must not; and what is our own mistake, as it is."""
        if eager.error is not None:
            eager.error.raise_own_mistake()
            if not self.options.may_raise:
                # Here, for compare() has no use for it.
                from pytest_torchcompile.oracle.eager_errors import EagerRaised, given_text

                raised = EagerRaised(call.label, eager.error)
                raised.given = given_text(eager.error, call.batch)
                raise raised

    def _compare_call(self, done: EagerCall, compiled: Recording, spread: Spread) -> None:
        call = done.call

        def expected() -> Reference:
            return self.call_reference(call)

        if done.one_process is not None:
            one_process = done.one_process.without(spread.names_elsewhere)
            self.leaves += self._beside_one_process(call.label, one_process, done.recording, expected)
        key = (call.index, call.other)
        judged = self._judged.leaves_of(key, done.recording, compiled)
        leaves = self._compare(done.recording, compiled, expected, key, call.batch_of_all, judged)
        # Other values come once.
        if call.other is None and not self._judged.knows(key):
            self._judged.keep(key, done.recording, compiled, leaves)
        self.leaves += [(call.label, leaf) for leaf in leaves]

    def _compare(self, eager: Recording, compiled: Recording, expected: Callable[[], Reference], key: Hashable,
                 batch: Batch, judged: Mapping[str, Leaf], without: frozenset[str] = frozenset()) -> list[Leaf]:
        """Compare two recordings, unless one process has compared the very same before. ``key``: of their tape.

        ``judged`` and ``without``: as for ``compare``.
        """
        if self.options.known is None or self._one_process is not None:
            return compare(eager, compiled, expected, judged=judged, without=without)
        from pytest_torchcompile.oracle.known_comparisons import Basis, compare_known

        basis = Basis(repr(key), self.texts, self.pristine, self.tapes[key], batch.value, judged, without)
        return compare_known(self.options.known, eager, compiled, expected, basis)

    @staticmethod
    def _beside_one_process(label: str, one_process: Recording, ranks: Recording,
                            expected: Callable[[], Reference]) -> Iterator[tuple[str, Leaf]]:
        """Hold what the ranks computed eagerly against what one process computes: values, no layouts of memory."""
        for leaf in compare(one_process, ranks, expected):
            if leaf.kind not in _LAYOUT:
                yield f"{label}, the ranks' eager run beside one process", replace(leaf, ranks=True)

    def _compare_settings(self, done: EagerCall, compiled: list[str]) -> None:
        """Compare what the two sides have left changed of torch's settings."""
        eager = done.settings
        self.leaks += [text for text in eager if text not in self.leaks]
        for texts, others, who, other in ((compiled, eager, "the compiled call", "eager's"),
                                          (eager, compiled, "the eager call", "the compiled one")):
            for text in texts:
                if text in others:
                    continue
                name, _, change = text.partition(": ")
                message = f"a setting of torch, is {change} after {who}, and not after {other}"
                self.leaves.append((done.call.label, Leaf(name, "mutation", message=message)))

    def new_tape(self, key: Hashable) -> Tape | None:
        """A tape for what runs for the first time."""
        if key in self.tapes:
            return None
        self.tapes[key] = Tape()
        return self.tapes[key]

    def call_reference(self, call: Call, unit: float | None = None) -> Reference:
        """What is expected of a call that was run eagerly before.

        ``unit``: the unit roundoff that noise is drawn with; None: the trial's own.
        """
        unit = unit or self.unit
        key = (call.index, call.other)

        def make() -> Reference:
            variant = self._variants.for_call(call)
            return reference(variant.model, call.batch_of_all, loss=self.loss, train=call.trains(self.train),
                             seed=self.seed + call.index, tape=self.tapes[key], unit=unit, draw=False,
                             kept=variant.wide)

        with self.phase("reference"):
            return self.options.references.get((*self.options.key, *key, unit), make)

    def _run_training(self, eager: Side, compiled: Side, ledger: Ledger) -> None:
        plan = self._plan_training(eager)
        with self.phase("training"):
            with ledger.during(_EAGER), eager_on_purpose():
                one_process = self._train_in_one_process(plan, eager.spread)
                recording = self._train(plan, eager, self.new_tape(plan.label))
            eager_errors = [run.error for run in (recording, one_process) if run is not None and run.error is not None]
            for error in eager_errors:
                error.raise_own_mistake()
            # What eager raises here is no problem of the compiled side: there is nothing to compare.
            if eager_errors:
                return
            with ledger.during(plan.label):
                compiled_recording = self._train(plan, compiled, None)
            if raised := compiled_recording.error:
                self.compiled.error = replace(raised, phase=f"{raised.phase}, in {plan.label}")
                return
        with self.phase("compare"), ledger.during(_EAGER):
            self._compare_training(plan, one_process, recording, compiled_recording)

    def _plan_training(self, eager: Side) -> _PlannedTraining:
        # From the first pass: the second has other values.
        calls = [passed.call for passed in self.passed[:len(self.calls)] if not passed.raised]
        # Over several ranks nothing is accumulated: they average, and a pipeline scales, what is there before the
        # backward pass too.
        accumulated = self._one_process is None and type(eager.spread) is Spread
        chosen = [calls[number % len(calls)] for number in range(self.steps)]
        return _PlannedTraining(chosen, f"{self.steps} training steps", accumulated)

    def _train(self, plan: _PlannedTraining, side: Side, tape: Tape | None,
               silent: frozenset[str] = frozenset()) -> Recording:
        side.restore()
        training = Training(side.module, side.call, self.loss, self.rate, self.replayed, side.spread, silent,
                            plan.accumulated)
        steps = steps_of(call.batch_for(side.spread) for call in plan.calls)
        return record(training, training, steps, loss=no_loss, seed=self.seed, mode=tape, spread=side.spread)

    def _train_in_one_process(self, plan: _PlannedTraining, ranks: Spread) -> Recording | None:
        """The same steps as one process makes them, without what is not on this rank; None where there is one only."""
        if self._one_process is None:
            return None
        elsewhere = ranks.names_elsewhere
        return self._train(plan, self._one_process, self.new_tape(plan.label), elsewhere).without(elsewhere)

    def _compare_training(self, plan: _PlannedTraining, one_process: Recording | None, eager: Recording,
                          compiled: Recording) -> None:
        all_replicas = steps_of(call.batch_of_all for call in plan.calls)

        def expected() -> Reference:
            return self._training_reference(all_replicas, plan)

        if one_process is not None:
            for about, leaf in self._beside_one_process(plan.label, one_process, eager, expected):
                self.trained += [(about, leaf) for leaf in rename_leaves([leaf], self.steps)]
        judged = self._judged.leaves_of_first_step(plan.calls[0].index, eager, compiled)
        without = parameters_told_by_gradients((eager, compiled), self.pristine, self.rate)
        leaves = self._compare(eager, compiled, expected, plan.label, all_replicas, judged, without)
        self.trained += [(plan.label, leaf) for leaf in rename_leaves(leaves, self.steps)]

    def _training_reference(self, batch: Batch, plan: _PlannedTraining) -> Reference:
        training = Training(self.pristine, None, self.loss, self.rate, accumulated=plan.accumulated)

        def make() -> Reference:
            return reference(training, batch, loss=no_loss, seed=self.seed, tape=self.tapes[plan.label],
                             unit=self.unit, draw=False, kept={})

        with self.phase("reference"):
            return self.options.references.get((*self.options.key, plan.label, self.unit), make)

    def _cover_calls(self, eager: Side, compiled: Side, ledger: Ledger) -> Fault | None:
        for call in self.calls:
            with ledger.during(f"{call.label}, once more"):
                if error := self._cover_call(eager, compiled, call):
                    return error
        return None

    def _cover_call(self, eager: Side, compiled: Side, call: Call) -> Fault | None:
        """Measure the coverage of a call; returns what it raised."""
        # A cell asks for it, compare() never does: who reviews that need not read torch's profiler too.
        from pytest_torchcompile.gauges.coverage import measure_coverage

        torch.manual_seed(self.seed + call.index)
        try:
            with torch.set_grad_enabled(self.train):
                measured = measure_coverage(eager.prepare_forward(call), compiled.prepare_forward(call))
        except TorchcompileError:
            raise
        except Exception as error:
            return Fault(type(error).__name__, str(error), "forward, in a later call", traceback.format_exc())
        self.compiled.coverage.append({"call": call.label, **measured.to_dict()})
        return None
