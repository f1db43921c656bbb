"""Trial account: what a trial is given, and what came of it so far; what its calls and its steps of training share."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_torchcompile.backends import promised
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.ledger.records import Text
from pytest_torchcompile.oracle.calls import Call, Make, Side, TrialOptions, Variants
from pytest_torchcompile.oracle.comparison import compare
from pytest_torchcompile.oracle.expected import Reference, room_beside
from pytest_torchcompile.oracle.held import HeldName
from pytest_torchcompile.oracle.judged_calls import JudgedCalls
from pytest_torchcompile.oracle.leaf_limits import Leaf
from pytest_torchcompile.oracle.recording import Fault, Recording
from pytest_torchcompile.oracle.reference_runs import reference
from pytest_torchcompile.oracle.tape import Tape

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.shared_numbers import SharedNumbers

__all__ = ["EAGER", "Compiled", "EagerCall", "OtherNumbersError", "Passed", "TrialAccount"]

# Kinds of leaves in which a part of a model may differ from the whole.
_LAYOUT = frozenset({"stride", "alias", "requires_grad", "rng"})
EAGER = "eager run"
"""What the ledger calls everything that isn't the compiled side's doing."""


@dataclass
class Compiled:
    """What instruments saw of the compiled side."""

    seen: dict[str, Any] = field(default_factory=dict)
    coverage: list[dict[str, Any]] = field(default_factory=list)
    """Per call, where it was asked for: the share of the model's operator calls that ran inside compiled graphs."""
    error: Fault | None = None
    """What ended the run."""


@dataclass(frozen=True)
class EagerCall:
    """A call that was run eagerly."""

    call: Call
    recording: Recording
    held: dict[HeldName, str]
    """What it did to the outputs that were kept of earlier calls."""
    one_process: Recording | None
    """The same by one process, if there are several."""
    settings: list[str]
    """Settings of torch that it has left changed."""

    def passed_with(self, compiled: Recording, graphs: int) -> Passed:
        """What is kept of it, with the compiled run of the same call and the number of graphs that ran in that."""
        eager = self.recording
        return Passed(self.call, eager.error is not None, graphs, compiled.all_zero, eager.all_zero,
                      eager.signalling_gradients)


@dataclass(frozen=True)
class Passed:
    """What is kept of one call that both sides have made, next to its leaves."""

    call: Call
    raised: bool
    """Did eager, and compiled too, raise?"""
    graphs: int
    """Compiled graphs that ran in it, backward included."""
    zero: bool
    """Are all outputs zero, NaN or infinite, compiled?"""
    eager_zero: bool
    gradients: int
    """Eager gradients that are not."""


class OtherNumbersError(Exception):
    """Eager could not be given the random numbers that compiled code draws."""


class TrialAccount:
    """What a trial is given, and what came of it so far."""

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
        # Graphs and generated code, where they are kept.
        self.texts: list[Text] = []
        self.seconds: dict[str, float] = {}
        tensors = (tensor for call in self.calls for tensor in call.batch.tensors())
        self.options.references.make_room(room_beside(tensors))
        self._variants = Variants(pristine)
        # Do CUDA graphs run? Each call then writes to the memory of the one before, as torch documents: what is kept
        # of a call is a copy, and outputs that somebody holds are not looked at again.
        self.replayed = promised(settings) and any(call.batch.is_on_cuda for call in self.calls)
        self.begin()

    def begin(self) -> None:
        """Know nothing yet of what a run will find."""
        # Runs the model as one process does, where the sides are spread over ranks.
        self.one_process: Side | None = None
        self.compiled = Compiled()
        self.passed: list[Passed] = []
        # What was compared in the calls, and in the training, each with its label.
        self.leaves: list[tuple[str, Leaf]] = []
        self.trained: list[tuple[str, Leaf]] = []
        # Why no step of training was compared: what eager raises in them.
        self.untrained = ""
        self.tapes: dict[Hashable, Tape] = {}
        # The compiled side, from the beginning of the run on: a check may go on with what was compiled.
        self.side: Side | None = None
        # Settings of torch that the model changes, eagerly too; they were put back.
        self.leaks: list[str] = []
        self.judged = JudgedCalls()
        self.rate, self.draws = 0.0, False  # of the training, 0: nothing to train; does the model draw random numbers?
        # Of compiled code that draws Inductor's own; None where it draws eager's.
        self.numbers: SharedNumbers | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall seconds of a block to the phase ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def compare_recordings(
        self, eager: Recording, compiled: Recording, expected: Callable[[], Reference], key: Hashable, batch: Batch,
        judged: Mapping[str, Leaf], without: frozenset[str] = frozenset(),
    ) -> list[Leaf]:
        """Compare two recordings, unless one process has compared the very same before. ``key``: of their tape.

        ``judged`` and ``without``: as for ``compare``.
        """
        if self.options.known is None or self.one_process is not None:
            return compare(eager, compiled, expected, judged=judged, without=without)
        from pytest_torchcompile.oracle.known_comparisons import Basis, compare_known

        basis = Basis(repr(key), self.texts, self.pristine, self.tapes[key], batch.value, judged, without)
        return compare_known(self.options.known, eager, compiled, expected, basis)

    @staticmethod
    def beside_one_process(label: str, one_process: Recording, ranks: Recording,
                           expected: Callable[[], Reference]) -> Iterator[tuple[str, Leaf]]:
        """Hold what the ranks computed eagerly against what one process computes: values, no layouts of memory."""
        for leaf in compare(one_process, ranks, expected):
            if leaf.kind not in _LAYOUT:
                yield f"{label}, the ranks' eager run beside one process", replace(leaf, ranks=True)

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
        of_numbers, around = self.numbers_of_reference()

        def make() -> Reference:
            self.options.begin_again()
            variant = self._variants.for_call(call)
            return reference(variant.model, call.batch_of_all, loss=self.loss, train=call.trains(self.train),
                             seed=self.seed + call.index, tape=self.tapes[key], unit=unit, draw=False,
                             kept=variant.wide, around=around)

        with self.phase("reference"):
            passing = call.other is not None  # other values come once
            return self.options.references.get(self.options.key, (*key, unit, *of_numbers), make, passing)

    def numbers_of_reference(self) -> tuple[tuple[Hashable, ...], Callable[[], AbstractContextManager[None]]]:
        """What tells a reference from those with other random numbers, and what is around its eager runs."""
        if self.numbers is None:
            return (), nullcontext
        # Not of the trial: a reference lives longer.
        return self.numbers.key, self.numbers.given

    def numbers_drawn(self) -> AbstractContextManager[None]:
        """For a compiled run."""
        return nullcontext() if self.numbers is None else self.numbers.drawn()

    def numbers_given(self) -> AbstractContextManager[None]:
        """For an eager run."""
        return nullcontext() if self.numbers is None else self.numbers.given()

    def check_numbers(self) -> None:
        """Give up where eager's last run had other random numbers than the last compiled one."""
        if self.numbers is not None and not self.numbers.agree():
            raise OtherNumbersError
