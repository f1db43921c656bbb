"""Trial: one program run eagerly and compiled, call by call, all compared: a cell of a matrix, or ``compare()``."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from pytest_torchcompile.ledger import Ledger, observe
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.oracle.calls import Call, Side, passes_over
from pytest_torchcompile.oracle.discrepancies import WITH_OWN_NUMBERS
from pytest_torchcompile.oracle.expected import Reference
from pytest_torchcompile.oracle.held import HeldName, held_leaves
from pytest_torchcompile.oracle.leaf_limits import Leaf
from pytest_torchcompile.oracle.properties import has_drawn, labels_with_other_draws
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.spread import Spread
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.oracle.training import learning_rate
from pytest_torchcompile.oracle.trial_account import EAGER, Compiled, EagerCall, OtherNumbersError, TrialAccount
from pytest_torchcompile.state.model_copy import copy_model
from pytest_torchcompile.state.torch_state import SettingsSnapshot, forget_compiled

__all__ = ["Compiled", "Trial"]


class Trial(TrialAccount):
    """One program, its calls, and what came of them. :meth:`run` once, then read.

    Each call is run on both sides and compared before the next, so that two recordings are in memory, not all.
    """

    def run(self) -> None:
        """Run everything on both sides and compare. Raises EagerRaised; see ``may_raise``.

        A model that draws random numbers may be run twice (:mod:`~pytest_torchcompile.oracle.production_numbers`).
        """
        start = time.perf_counter()
        try:
            self._run_sides()
        except OtherNumbersError:
            wrong = []
        else:
            if self.numbers is None:
                return
            # Here, for most models draw nothing.
            from pytest_torchcompile.oracle.production_numbers import is_settled, wrong_gradients

            if is_settled(self):
                return
            wrong = wrong_gradients(self)
        self._run_with_numbers_of_eager(time.perf_counter() - start)
        # What is wrong with eager's numbers too is told of that run alone.
        if wrong and is_settled(self):
            self.leaves += wrong

    def _run_with_numbers_of_eager(self, seconds: float) -> None:
        """Run once more. ``seconds``: what the run before took, whose code drew its own."""
        self.options = replace(self.options, own_numbers=False)
        self.seconds = {WITH_OWN_NUMBERS: seconds}
        # Code that draws its own numbers fits the same guards.
        forget_compiled()
        self.begin()
        self._run_sides()

    def _run_sides(self) -> None:
        with self.phase("build"):
            # None serves the other: a model may count its calls or keep tensors in Python.
            eager, compiled = self.make(None), self.make(dict(self.settings))
            if self.options.one_process is not None:
                self.one_process = self.options.one_process()
        self.side = compiled
        instrument = self.options.instrument or nullcontext
        with observe(root=self.root, keep_texts=self.options.keep_texts) as ledger, instrument(ledger):
            self.texts = ledger.texts
            self._run_calls(eager, compiled, ledger)
            if self.steps > 1 and self.train and self.rate and self.compiled.error is None:
                # compare() makes no steps by default.
                from pytest_torchcompile.oracle.trained_steps import run_training

                run_training(self, eager, compiled, ledger)
            if self.options.covered and self.compiled.error is None:
                # A cell asks for it, compare() never does: who reviews that need not read torch's profiler too.
                from pytest_torchcompile.oracle.covered_calls import cover_calls

                with self.phase("coverage"):
                    self.compiled.error = cover_calls(self, eager, compiled, ledger)
        self.compiled.seen = seen = ledger.to_dict(self.root or Path.cwd())
        seen["eager_frames"] = [frame for frame in seen["eager_frames"] if frame["during"] != EAGER]
        if self.numbers is None and labels_with_other_draws([*self.leaves, *self.trained]):
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

    def _run_calls(self, eager: Side, compiled: Side, ledger: Ledger) -> None:
        planned_passes = passes_over(self.calls, self.seed if self.options.varied else None)
        for number, calls in enumerate(islice(planned_passes, self.options.passes)):
            for planned in calls:
                done = self._run_eagerly(eager, planned, ledger)
                if self.options.own_numbers and not self.passed:
                    self._choose_numbers(done, eager.spread)
                graph_runs = ledger.graph_runs
                settings = SettingsSnapshot()
                # Only the first pass compiles.
                phase = "steady" if number else "compiled"
                with self.phase(phase), ledger.during(done.call.label), self.numbers_drawn():
                    recording, held = compiled.run(done.call, self.loss, self.train, self.seed)
                self._compare_settings(done, settings.restore())
                if recording.error and not done.recording.error:
                    self.compiled.error = recording.error
                    return
                if not self.compared:
                    continue
                done = self._with_same_numbers(done, recording, eager, ledger)
                self.passed.append(done.passed_with(recording, ledger.graph_runs - graph_runs))
                if self.steps > 1 and not self.rate:
                    self.rate = learning_rate((self.one_process or eager).module, done.one_process or done.recording)
                with self.phase("compare"), ledger.during(EAGER):
                    self._compare_call(done, recording, eager.spread)
                    if not self.replayed:
                        self.leaves += held_leaves(done.held, held, done.call.label)

    def _run_eagerly(self, side: Side, call: Call, ledger: Ledger) -> EagerCall:
        """Run a call eagerly, and also by one process if there are several."""
        settings = SettingsSnapshot()
        first = self.one_process or side
        one_process = None
        with self.phase("eager"), ledger.during(EAGER), eager_on_purpose():
            tape = self.new_tape((call.index, call.other))
            recording, held = self._run_side(first, call, tape)
            if recording.error and call.other is not None and not self.passed[call.index].raised:
                # The model does not take the other values.
                call = replace(self.calls[call.index], suffix=call.suffix)
                recording, held = self._run_side(first, call)
            self._check_eager(call, recording)
            if first is not side:
                one_process = recording
                recording, held = self._run_side(side, call)
        changes = settings.restore()
        self._check_eager(call, recording)
        self.draws = self.draws or has_drawn(recording, self.seed + call.index)
        return EagerCall(call, recording, held, one_process, changes)

    def _run_side(self, eager: Side, call: Call, tape: Tape | None = None) -> tuple[Recording, dict[HeldName, str]]:
        with self.numbers_given():
            return eager.run(call, self.loss, self.train, self.seed, tape)

    def _choose_numbers(self, done: EagerCall, spread: Spread) -> None:
        """Have compiled code draw its own numbers, where the first call shows that eager can be given them."""
        if self.draws:
            # Here, for most models draw nothing.
            from pytest_torchcompile.oracle.production_numbers import numbers_for

            self.numbers = numbers_for(self, done, spread)

    def _with_same_numbers(self, done: EagerCall, compiled: Recording, eager: Side, ledger: Ledger) -> EagerCall:
        """The eager call with the numbers that the compiled one has drawn; of the first call it is another run."""
        numbers = self.numbers
        if numbers is None:
            return done
        if numbers.groups:
            self.check_numbers()
            return done
        from pytest_torchcompile.oracle.production_numbers import have_one_form, look_alike

        numbers.take_groups()
        # Where no draw was seen, nobody knows what the compiled call has drawn.
        for way in numbers.ways if numbers.groups else ():
            numbers.way = way
            # The run before was another program's, whose draws, outputs and counters are none of this one's.
            del self.tapes[done.call.index, done.call.other]
            eager.start_over(self.make(None))
            again = self._run_eagerly(eager, done.call, ledger)
            if not numbers.agree() or not look_alike(again.recording, compiled):
                continue
            if have_one_form(done.recording, again.recording):
                return again
        raise OtherNumbersError

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

        @cache
        def expected() -> Reference:
            return self.call_reference(call)

        if done.one_process is not None:
            one_process = done.one_process.without(spread.names_elsewhere)
            self.leaves += self.beside_one_process(call.label, one_process, done.recording, expected)
        key = (call.index, call.other)
        judged = self.judged.leaves_of(key, done.recording, compiled)
        leaves = self.compare_recordings(done.recording, compiled, expected, key, call.batch_of_all, judged)
        # Other values come once.
        if call.other is None and not self.judged.knows(key):
            self.judged.keep(key, done.recording, compiled, leaves)
        self.leaves += [(call.label, leaf) for leaf in leaves]

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
