"""Trial: one program run eagerly and compiled, call by call, and everything compared. A cell of a matrix is one,
and so is :func:`~pytest_torchcompile.compare`.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from pytest_torchcompile.backends import promised
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.gauges import coverage
from pytest_torchcompile.gauges.replays import step_begins
from pytest_torchcompile.ledger import Ledger, observe
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.ledger.records import Text
from pytest_torchcompile.oracle.calls import Call, Loss, Make, Passed, Side, memory_behind, passes_over, vary_parameters
from pytest_torchcompile.oracle.comparison import compare
from pytest_torchcompile.oracle.discrepancies import headline
from pytest_torchcompile.oracle.expected import Reference, References
from pytest_torchcompile.oracle.leaf import Leaf
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.oracle.recording import Fault, Recording, has_signal
from pytest_torchcompile.oracle.reference_runs import reference
from pytest_torchcompile.oracle.shared_memory import held_leaves
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.oracle.training import Training, learning_rate, no_loss, rename_steps, steps_of
from pytest_torchcompile.state.model_copy import copy_model
from pytest_torchcompile.state.torch_state import SettingsSnapshot

__all__ = ["Compiled", "EagerRaised", "Trial"]

_LAYOUT = frozenset({"stride", "alias", "requires_grad", "rng"})
"""Kinds of leaves in which a part of a model may differ from the whole."""
_EAGER = "eager run"
"""What the ledger calls everything that isn't the compiled side's doing."""


@dataclass
class Compiled:
    """What instruments saw of the compiled side."""

    seen: dict[str, Any] = field(default_factory=dict)
    coverage: list[dict[str, Any]] = field(default_factory=list)
    """Per call, where it was asked for: the share of the model's operator calls that ran inside compiled graphs."""
    error: Fault | None = None
    """What ended the run."""


class EagerRaised(Exception):
    """The model raises without torch.compile too."""

    def __init__(self, label: str, error: Fault) -> None:
        super().__init__(f"the model raises without torch.compile too, at {label}: {error.type}: "
                         f"{headline(error.text)}")
        self.error = error


class Trial:
    """One program, its calls, and what came of them. :meth:`run` once, then read.

    Each call is run on both sides and compared before the next, so that two recordings are in memory, not all.
    """

    def __init__(
        self,
        make: Make,
        pristine: torch.nn.Module,
        settings: dict[str, Any],
        calls: Sequence[Call],
        *,
        loss: Loss | None = None,
        train: bool = True,
        steps: int = 1,
        seed: int = 0,
        unit: float | None = None,
        root: Path | None = None,
        references: References | None = None,
        key: tuple[Hashable, ...] = (),
        covered: bool = False,
        may_raise: bool = False,
        varied: bool = True,
        passes: int = 3,
        keep_texts: bool = False,
        alone: Callable[[], Side] | None = None,
        compared: bool = True,
    ) -> None:
        """Take what is run, and how.

        Args:
            make: Makes the sides.
            pristine: The model in its initial state, for references: never run, never changed.
            settings: Of ``torch.compile``.
            calls: In their order.
            loss: As for ``record``.
            train: As for ``record``.
            steps: SGD steps of a training; 1: none beyond the gradients of each call.
            seed: As for ``record``.
            unit: As for ``reference``.
            root: The project's root folder.
            references: Where they are kept, for other trials of the same model too.
            key: What tells the model there from others.
            covered: Measure the coverage, by two more forward passes of each call under torch's profiler.
            may_raise: A call that raises eagerly has to raise compiled too; else it ends the trial.
            varied: Give the second pass other values; not for a model that can't be copied.
            passes: How many of the three passes over the calls are made.
            keep_texts: Keep what each stage of the compiler has written.
            alone: Makes the model as one process runs it, where ``make`` makes parts of it that run on several ranks:
                the eager side is held against that too, and ``pristine`` is the model as one process has it.
            compared: Compare what came of the calls; not where their numbers mean nothing.
        """
        self.make, self.pristine, self.settings, self.calls = make, pristine, settings, list(calls)
        self.loss, self.train, self.steps, self.seed, self.unit = loss, train, steps, seed, unit
        self.root, self.covered, self.may_raise, self.varied = root, covered, may_raise, varied
        self.passes, self.keep_texts, self._make_alone = passes, keep_texts, alone
        self.compared = compared
        self.wrapping = "none"
        """How the model is wrapped, for what is said of it."""
        self._alone: Side | None = None
        self.texts: list[Text] = []
        """Graphs and generated code, where they are kept."""
        self.seconds: dict[str, float] = {}
        self.compiled = Compiled()
        self.passed: list[Passed] = []
        self.leaves: list[tuple[str, Leaf]] = []
        """What was compared in the calls, each with its label."""
        self.trained: list[tuple[str, Leaf]] = []
        """What was compared in the training."""
        self._references, self._key = references or References(), key
        self._references.make_room(memory_behind(self.calls))
        self._tapes: dict[Hashable, Tape] = {}
        self.side: Side | None = None
        """The compiled side, from the beginning of the run on: a check may go on with what was compiled."""
        self.leaks: list[str] = []
        """Settings of torch that the model changes, eagerly too; they were put back."""
        self.rate = 0.0
        """Learning rate of the training; 0: there is nothing to train."""
        self._changes: list[str] = []
        tensors = (tensor for call in self.calls for tensor in call.batch.tensors())
        self.replayed = promised(settings) and any(tensor.is_cuda for tensor in tensors)
        """Do CUDA graphs run? Each call then writes to the memory of the one before, as torch documents: what is kept
        of a call is a copy, and outputs that somebody holds are not looked at again."""

    def run(self) -> None:
        """Run everything on both sides and compare. Raises EagerRaised; see ``may_raise``."""
        with self.phase("build"):
            # None serves the other: a model may count its calls or keep tensors in Python.
            eager, compiled = self.make(None), self.make(dict(self.settings))
            self._alone = None if self._make_alone is None else self._make_alone()
        self.side = compiled
        with observe(root=self.root, keep_texts=self.keep_texts) as seen:
            self._run_calls(eager, compiled, seen)
            if self.steps > 1 and self.train and self.rate and self.compiled.error is None:
                self._run_training(eager, compiled, seen)
            if self.covered and self.compiled.error is None:
                with self.phase("coverage"):
                    self.compiled.error = self._cover_all(eager, compiled, seen)
        self.compiled.seen, self.texts = _relative(seen.to_dict(), self.root), seen.texts

    def again(self, settings: dict[str, Any]) -> Trial:
        """The same trial, not yet run, with other settings of ``torch.compile``."""
        return Trial(
            self.make, self.pristine, settings, self.calls, loss=self.loss, train=self.train, steps=self.steps,
            seed=self.seed, unit=self.unit, root=self.root, references=self._references, key=self._key,
            may_raise=self.may_raise, varied=self.varied, passes=self.passes, alone=self._make_alone,
            compared=self.compared,
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall seconds of a block to the phase ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _run_calls(self, eager: Side, compiled: Side, seen: Ledger) -> None:
        before: Call | None = None
        planned_passes = passes_over(self.calls, self.seed if self.varied else None)
        for number, calls in enumerate(islice(planned_passes, self.passes)):
            for planned in calls:
                call, mine, kept, one = self._eagerly(eager, planned, seen)
                runs = sum(graph.runs for graph in seen.graphs)
                settings = SettingsSnapshot()
                with self.phase("steady" if number else "compiled"), seen.during(call.label):
                    found, held = compiled.run(call, self.loss, self.train, self.seed)
                self._settings_left(call, settings.restore())
                if found.error and not mine.error:
                    self.compiled.error = found.error
                    return
                if not self.compared:
                    continue
                self.passed.append(Passed(
                    call, mine.error is not None, sum(graph.runs for graph in seen.graphs) - runs,
                    found.all_zero, mine.all_zero, sum(has_signal(g) for g in mine.gradients.values() if g is not None),
                ))
                if self.steps > 1 and not self.rate:
                    self.rate = learning_rate((self._alone or eager).module, one or mine)
                with self.phase("compare"), seen.during(_EAGER):
                    if one is not None:
                        self.leaves += self._beside_one_process(
                            call.label, one.without(eager.others), mine,
                            lambda c=call: self._reference(c))  # type: ignore[misc]
                    compared = compare(mine, found, lambda call=call: self._reference(call))  # type: ignore[misc]
                    self.leaves += [(call.label, leaf) for leaf in compared]
                    if before is not None and not self.replayed:
                        self.leaves += [(before.label, leaf) for leaf in held_leaves(kept, held, call.label)]
                before = call

    def _eagerly(self, side: Side, call: Call,
                 seen: Ledger) -> tuple[Call, Recording, dict[str, str], Recording | None]:
        """Run a call eagerly, and also by one process if there are several."""
        settings = SettingsSnapshot()
        first = self._alone or side
        with self.phase("eager"), seen.during(_EAGER), eager_on_purpose():
            mine, kept = first.run(call, self.loss, self.train, self.seed, self._tape((call.index, call.other)))
            if mine.error and call.other is not None and not self.passed[call.index].raised:
                # The model does not take the other values.
                call = replace(self.calls[call.index], suffix=call.suffix)
                mine, kept = first.run(call, self.loss, self.train, self.seed)
            self._refuse(call, mine)
            one = None
            if first is not side:
                one = mine
                mine, kept = side.run(call, self.loss, self.train, self.seed)
        self._changes = settings.restore()
        self._refuse(call, mine)
        return call, mine, kept, one

    def _refuse(self, call: Call, eager: Recording) -> None:
        """Raise EagerRaised for what the model raises, where it must not; and what is our own mistake, as it is."""
        if eager.error is not None:
            _raise_ours(eager.error)
            if not self.may_raise:
                raise EagerRaised(call.label, eager.error)

    @staticmethod
    def _beside_one_process(label: str, one: Recording, ranks: Recording,
                            expected: Callable[[], Reference]) -> Iterator[tuple[str, Leaf]]:
        """Hold what the ranks computed eagerly against what one process computes: values, no layouts of memory."""
        for leaf in compare(one, ranks, expected):
            if leaf.kind not in _LAYOUT:
                yield f"{label}, the ranks' eager run beside one process", replace(leaf, ranks=True)

    def _settings_left(self, call: Call, changes: list[str]) -> None:
        """Compare what the two sides have left changed of torch's settings."""
        self.leaks += [text for text in self._changes if text not in self.leaks]
        for texts, others, who, other in ((changes, self._changes, "the compiled call", "eager's"),
                                          (self._changes, changes, "the eager call", "the compiled one")):
            for name, _, change in (text.partition(": ") for text in texts if text not in others):
                message = f"a setting of torch, is {change} after {who}, and not after {other}"
                self.leaves.append((call.label, Leaf(name, "mutation", message=message)))

    def _tape(self, key: Hashable) -> Tape | None:
        """A tape for what runs for the first time."""
        if key in self._tapes:
            return None
        self._tapes[key] = Tape()
        return self._tapes[key]

    def _reference(self, call: Call) -> Reference:
        key = (call.index, call.other)

        def make() -> Reference:
            model = self.pristine
            if call.other is not None or call.training is not None:
                model = copy_model(model)
                call.switch_mode(model)
            if call.other is not None:
                vary_parameters(model, call.other)
            return reference(model, call.batch, loss=self.loss, train=call.trains(self.train),
                             seed=self.seed + call.index, tape=self._tapes[key], unit=self.unit, also=call.also,
                             draw=False)

        with self.phase("reference"):
            return self._references.get((*self._key, *key), make)

    def _run_training(self, eager: Side, compiled: Side, seen: Ledger) -> None:
        calls = [passed.call for passed in self.passed[:len(self.calls)] if not passed.raised]
        chosen = [calls[i % len(calls)] for i in range(self.steps)]
        batch, whole = steps_of([(c.batch,) for c in chosen]), steps_of([(c.batch, *c.also) for c in chosen])
        label = f"{self.steps} training steps"

        def train(side: Side, mode: AbstractContextManager[Any] | None,
                  others: frozenset[str] = frozenset()) -> Recording:
            side.restore()
            training = Training(side.module, side.call, self.loss, self.rate, self.replayed, side.whole, others,
                                side.others)
            return record(training, training, whole if side.alone else batch, loss=no_loss, seed=self.seed, mode=mode,
                          whole=side.whole)

        with self.phase("training"):
            with seen.during(_EAGER), eager_on_purpose():
                one = None
                if self._alone is not None:
                    one = train(self._alone, self._tape(label), eager.others).without(eager.others)
                mine = train(eager, self._tape(label))
            if failed := [seen.error for seen in (mine, one) if seen is not None and seen.error is not None]:
                for error in failed:
                    _raise_ours(error)
                return
            with seen.during(label):
                found = train(compiled, None)
            if found.error:
                self.compiled.error = replace(found.error, phase=f"{found.error.phase}, in {label}")
                return
        with self.phase("compare"), seen.during(_EAGER):
            def expected() -> Reference:
                return self._training_reference(whole, label)

            if one is not None:
                beside = list(self._beside_one_process(label, one, mine, expected))
                self.trained = [(told, new) for told, leaf in beside for new in rename_steps([leaf], self.steps)]
            self.trained += [(label, leaf) for leaf in rename_steps(compare(mine, found, expected), self.steps)]

    def _training_reference(self, batch: Batch, label: str) -> Reference:
        training = Training(self.pristine, None, self.loss, self.rate)
        with self.phase("reference"):
            return self._references.get((*self._key, label), lambda: reference(
                training, batch, loss=no_loss, seed=self.seed, tape=self._tapes[label], unit=self.unit,
                draw=False))

    def _cover_all(self, eager: Side, compiled: Side, seen: Ledger) -> Fault | None:
        for call in self.calls:
            with seen.during(f"{call.label}, once more"):
                if error := self._cover(eager, compiled, call):
                    return error
        return None

    def _cover(self, eager: Side, compiled: Side, call: Call) -> Fault | None:
        def forward(side: Side) -> Callable[[], object]:
            side.restore()
            batch = call.batch.clone()

            def run() -> object:
                step_begins()
                return side.call(*batch.args, **batch.kwargs)

            return run

        torch.manual_seed(self.seed + call.index)
        try:
            with torch.set_grad_enabled(self.train):
                found = coverage.measure_coverage(forward(eager), forward(compiled))
        except TorchcompileError:
            raise
        except Exception as error:
            return Fault(type(error).__name__, str(error), "forward, in a later call", traceback.format_exc())
        self.compiled.coverage.append({"call": call.label, **found.to_dict()})
        return None


def _raise_ours(error: Fault) -> None:
    """Raise what our own code had raised: nothing is known of the model then."""
    if error.ours and error.exception is not None:
        raise error.exception


def _relative(seen: dict[str, Any], root: Path | None) -> dict[str, Any]:
    """Name the project's files from its root, so that reports of two checkouts agree; drop what eager runs did."""
    home = f"{root or Path.cwd()}{os.sep}"
    seen["eager_frames"] = [frame for frame in seen["eager_frames"] if frame["during"] != _EAGER]
    for records in (value for value in seen.values() if isinstance(value, list)):
        for found in records:
            if isinstance(found, dict) and str(found.get("file", "")).startswith(home):
                found["file"] = found["file"].removeprefix(home)
    return seen
