"""One history: its calls run eagerly and compiled, one after the other, and everything compared after each.

Both sides keep what a call leaves behind, as a module in service does. What rounding makes of it would add up, so the
compiled side begins each call with eager's values.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.contract.changed_batch import changed_batch, of_kind
from pytest_torchcompile.contract.mutation import mutation
from pytest_torchcompile.contract.stand_in import put_in
from pytest_torchcompile.fuzz.drawn_call import DrawnCall, Sequence
from pytest_torchcompile.gauges.autotune import timing_behind_stride
from pytest_torchcompile.gauges.compile_caches import count_caches
from pytest_torchcompile.ledger import observe
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.oracle.comparison import compare
from pytest_torchcompile.oracle.discrepancies import Discrepancy, find_discrepancies, why_vacuous
from pytest_torchcompile.oracle.expected import Reference
from pytest_torchcompile.oracle.leaf_limits import Leaf, is_stride
from pytest_torchcompile.oracle.operator_rounding import unit_of
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.oracle.recording import Recording, has_signal
from pytest_torchcompile.oracle.reference_runs import reference
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.state.snapshot import StateSnapshot, write_value
from pytest_torchcompile.state.tensor_forms import is_plain, same_bits
from pytest_torchcompile.state.torch_state import SettingsSnapshot, forget_compiled
from pytest_torchcompile.state.value_leaves import attribute_tensors

__all__ = ["HistoryOutcome", "Program", "moved_side", "offered_choices", "run_history"]


@dataclass(frozen=True)
class Program:
    """A model and how it is called."""

    make_model: Callable[[], nn.Module]
    """The same model, each time anew."""
    settings: Mapping[str, Any]
    """Of ``torch.compile``."""
    batch: Callable[[Mapping[str, int], int], Batch]
    """``batch(sizes, seed)``."""
    loss: Callable[..., Any] | None = None
    train: bool = True
    seed: int = 0
    compiler: Callable[[nn.Module], Callable[..., Any]] | None = None
    """What makes the compiled side of a module, where ``torch.compile`` with the settings does not."""


@dataclass
class HistoryOutcome:
    """What one history came to."""

    problem: Discrepancy | None = None
    at: int = -1
    """Index of the call that shows it."""
    moved: str = ""
    """The side that moved, ``eager`` or ``compiled``: see :func:`moved_side`."""
    calls: int = 0
    """Calls that ran on both sides and were compared."""
    refused: int = 0
    """Calls that eager refuses; compiled code was not asked."""
    mute: int = 0
    """Calls whose agreement proves nothing: zeros, NaN, rounding noise, or values that eager does not repeat."""
    graphs: int = 0
    """Graphs that were compiled and ran."""
    hits: int = 0
    """Graphs that torch's caches had."""
    misses: int = 0
    """Graphs that they had not."""
    seconds: float = 0.0
    in_calls: float = 0.0
    """Seconds of them within the calls themselves, compiling included."""


def offered_choices(module: nn.Module, batch: Batch, names: tuple[str, ...]) -> dict[str, list[str]]:
    """What each mutation has to choose from for a model and a batch; those without anything are left out."""
    offered: dict[str, list[str]] = {}
    for name in names:
        if choices := mutation(name).choices(module, batch):
            offered[name] = choices
    return offered


def run_history(program: Program, history: Sequence, tell: Callable[[int, str], object],
                without: tuple[str, ...] = (), backend: Any = None) -> HistoryOutcome:
    """Run a history from a fresh compiler state; it ends with the first call that shows something.

    Args:
        program: What is called.
        history: How; see :class:`~pytest_torchcompile.fuzz.drawn_call.DrawnCall`.
        tell: Told the index of a call and the side, ``eager`` or ``compiled``, before it runs: it may be the last word.
        without: What stands in for submodules on both sides, as in ``stand_in.py``.
        backend: In place of the program's.
    """
    start, outcome = time.perf_counter(), HistoryOutcome()
    settings = SettingsSnapshot()
    forget_compiled()
    try:
        with warnings.catch_warnings(), observe() as seen:
            # A filter that makes errors of warnings would have torch's own end a compile.
            warnings.simplefilter("ignore")
            sides = _Sides(program, without, backend, tell, outcome)
            for index, drawn in enumerate(history):
                outcome.problem = sides.run_call(index, drawn)
                if outcome.problem is not None:
                    outcome.at = index
                    break
            outcome.graphs = sum(graph.runs > 0 for graph in seen.graphs)
            caches = count_caches()
            outcome.hits, outcome.misses = caches.hits, caches.misses
    finally:
        settings.restore()
    outcome.seconds = time.perf_counter() - start
    return outcome


@dataclass
class _Sides:
    """The two modules of a history, which change with it."""

    program: Program
    without: tuple[str, ...]
    backend: Any
    tell: Callable[[int, str], object]
    outcome: HistoryOutcome
    eager: nn.Module = field(init=False)
    compiled: nn.Module = field(init=False)
    compile: Any = field(init=False)
    settings: Mapping[str, Any] = field(init=False)
    """Of ``torch.compile``, with the backend of this history."""
    device_type: str = "cpu"
    """Where the last call computed."""
    inner_unit: float = 0.0
    """The unit roundoff of the autocast that the module enters itself, as some call of the history has made it."""

    def __post_init__(self) -> None:
        self.eager, self.compiled = self._make_module(), self._make_module()
        settings = dict(self.program.settings)
        if self.backend is not None:
            settings = {name: value for name, value in settings.items() if name != "mode"} | {"backend": self.backend}
        self.settings = settings
        # A module is compiled once, however often it is called.
        compiler = self.program.compiler or functools.partial(torch.compile, **settings)
        self.compile = functools.cache(compiler)

    def _make_module(self) -> nn.Module:
        module = self.program.make_model()
        put_in(module, self.without)
        return module

    def run_call(self, index: int, drawn: DrawnCall) -> Discrepancy | None:
        """Run one call on both sides; returns the first thing that is wrong."""
        changes = dict(drawn.mutations)
        if not self._change_modules(drawn, changes):
            self.outcome.refused += 1
            return None
        batch = changed_batch(self.program.batch(dict(drawn.sizes), self.program.seed + index), changes)
        if batch is None:
            self.outcome.refused += 1
            return None
        _copy_values(self.eager, self.compiled)
        trains = self.program.train if drawn.training is None else drawn.training
        before, tape = StateSnapshot(self.eager), Tape()
        self.tell(index, "eager")
        with eager_on_purpose():
            eager = self._record(self.eager, None, batch, index, changes, trains, tape)
        if eager.error is not None:
            # Eager does not take it, so there is nothing that compiled code could break.
            before.restore(counters=True)
            self.outcome.refused += 1
            return None
        self.tell(index, "compiled")
        compiled = self._record(self.compiled, self.compile, batch, index, changes, trains, None)
        self.tell(index, "comparing")
        self.outcome.calls += 1
        return self._compare(index, batch, eager, compiled, before, tape, changes, trains)

    def _change_modules(self, drawn: DrawnCall, changes: Mapping[str, str]) -> bool:
        """Change both modules; False where eager's refuses it, which then is as it was on neither side."""
        for each in of_kind("module", changes):
            try:
                each.act(self.eager, changes[each.name])
            except Exception:  # whatever the user's module raises
                return False
            each.act(self.compiled, changes[each.name])
            # At once: another change of this call may still be refused.
            if each.name == "inner_autocast":
                self.inner_unit = max(self.inner_unit, unit_of(getattr(torch, changes["inner_autocast"])))
        if drawn.training is not None:
            self.eager.train(drawn.training)
            self.compiled.train(drawn.training)
        return True

    def _record(self, module: nn.Module, compile: Any, batch: Batch, index: int, changes: Mapping[str, str],
                trains: bool, tape: Tape | None) -> Recording:
        call: Callable[..., Any] = module if compile is None else compile(module)
        for each in of_kind("call", changes):
            module, call = each.act(module, compile, changes[each.name])
        device = self.device_type = _device_type(module, batch)
        around = of_kind("around", changes)

        def mutated(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for each in around:
                    stack.enter_context(each.act(changes[each.name], device))
                return call(*args, **kwargs)

        begun = time.perf_counter()
        recording = record(mutated, module, batch, loss=self.program.loss, train=trains,
                           seed=self.program.seed + index, mode=tape)
        self.outcome.in_calls += time.perf_counter() - begun
        return recording

    def _compare(self, index: int, batch: Batch, eager: Recording, compiled: Recording, before: StateSnapshot,
                 tape: Tape, changes: Mapping[str, str], trains: bool) -> Discrepancy | None:
        unit = None
        if "autocast" in changes:
            unit = max(unit_of(getattr(torch, changes["autocast"])), self.inner_unit)
        visible = _visible_changes(changes)
        # A backward pass that the call has not may raise: some operators have none.
        has_backward = trains and visible.get("grad_mode") != "no_grad"

        @functools.cache
        def expected() -> Reference:
            # Of the module as it was before the call, which has left it as it is now.
            seen = tape
            if visible != changes:
                # Run once more where a dispatch mode sees how each operator rounds.
                seen = Tape()
                with _as_before(self.eager, before):
                    self._record(self.eager, None, batch, index, visible, trains, seen)
            with _as_before(self.eager, before):
                return reference(self.eager, batch, loss=self.program.loss, train=has_backward,
                                 seed=self.program.seed + index, tape=seen, unit=unit, draw=False)

        leaves, found = self._found(eager, compiled, expected)
        if found:
            # Beside a tape, as beside any dispatch mode, torch takes another way in some operators: an LSTM under
            # autocast in inference mode gives float32 then. What counts is eager as the caller runs it.
            with _as_before(self.eager, before):
                plain = self._record(self.eager, None, batch, index, changes, trains, None)
            leaves, found = [], []
            if plain.error is None:
                leaves, found = self._found(plain, compiled, expected)
        if not found:
            self.outcome.mute += not _has_signal(eager) or why_vacuous(leaves) is not None
            return None
        # Wrong numbers before anything else that differs.
        first = min(found, key=lambda each: each.kind in ("stride", "nondeterministic", "rng"))
        about = [leaf for _, leaf in leaves if (leaf.kind, leaf.name) == (first.kind, first.where)]
        self.outcome.moved = moved_side(about[0]) if about else "compiled"
        return replace(first, evidence="")

    def _found(self, eager: Recording, compiled: Recording,
               expected: Callable[[], Reference]) -> tuple[list[tuple[str, Leaf]], list[Discrepancy]]:
        """What was compared, and what of it is wrong."""
        leaves = []
        for leaf in compare(eager, compiled, expected):
            if not _is_last_digit(leaf) and not self._is_timed_stride(leaf):
                leaves.append(("", leaf))
        found = find_discrepancies(leaves)
        if self.program.loss is None and _are_outputs_decided(leaves) and all(each.where == "loss" for each in found):
            # The loss that we make up follows from the outputs, by eager code of ours.
            found = []
        return leaves, found


    def _is_timed_stride(self, leaf: Leaf) -> bool:
        """Whether a stride is another one since a stopwatch may have wanted it so: see the check ``layout``."""
        if not is_stride(leaf):
            return False
        return bool(timing_behind_stride(self.settings, {self.device_type}, str(leaf.eager), str(leaf.compiled)))


def moved_side(leaf: Leaf) -> str:
    """The side that is further from what is expected: ``compiled``, unless a float64 run tells that it is eager.

    Where no number was expected, eager is what is right.
    """
    values = (leaf.eager, leaf.compiled, leaf.expected)
    if leaf.against not in ("float64", "float32") or not all(isinstance(each, (int, float)) for each in values):
        return "compiled"
    eager, compiled, expected = (float(each) for each in values if each is not None)
    return "eager" if _distance(compiled, expected) < _distance(eager, expected) else "compiled"


def _distance(value: float, expected: float) -> float:
    """How far apart two numbers are; NaN is NaN, and an infinity is near to itself alone."""
    if value == expected or (math.isnan(value) and math.isnan(expected)):
        return 0.0
    return abs(value - expected) if math.isfinite(value) and math.isfinite(expected) else math.inf


def _are_outputs_decided(leaves: list[tuple[str, Leaf]]) -> bool:
    """Whether something was found out about every output: of one that drowns in noise the loss may know more."""
    return all(leaf.decided for _, leaf in leaves if leaf.kind == "value" and leaf.name != "loss")


_LAST_DIGITS: Final = 16.0
"""Eps of a float64 leaf's largest value, up to which an error is none: 3.6e-15 of it."""


def _is_last_digit(leaf: Leaf) -> bool:
    """Whether a float64 leaf is off by no more than a few units of its largest value's last place.

    Nothing more exact is there to hold it against. The noise that we draw knows what each operator rounds, and not what
    it rounds inside: where an image is sampled, for one.
    """
    if leaf.against != "same-precision" or leaf.dtype not in ("float64", "complex128"):
        return False
    return leaf.grain is not None and leaf.grain <= _LAST_DIGITS


def _has_signal(recording: Recording) -> bool:
    values = [value for _, _, value in recording.values() if isinstance(value, torch.Tensor)]
    return any(map(has_signal, values))


def _device_type(module: nn.Module, batch: Batch) -> str:
    """Where a call computes; a chain of functions has no parameters, but inputs."""
    inputs = [leaf for leaf in pytree.tree_leaves(batch.value) if isinstance(leaf, torch.Tensor)]
    tensors = [*module.parameters(), *inputs]
    return tensors[0].device.type if tensors else "cpu"


def _copy_values(source: nn.Module, target: nn.Module) -> None:
    """All tensors of one module, bit by bit, into the other, which has them under the same names."""
    theirs = dict(_named_tensors(target))
    with torch.no_grad():
        for name, value in _named_tensors(source):
            other = theirs.get(name)
            if other is None or other.shape != value.shape or other.dtype != value.dtype:
                continue
            if not same_bits(other.detach(), value.detach()):
                write_value(other, value)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and tensors that modules keep in attributes, such as lists."""
    yield from module.named_parameters()
    yield from module.named_buffers()
    for name, tensor in attribute_tensors(module):
        if is_plain(tensor):
            yield name, tensor


def _visible_changes(changes: Mapping[str, str]) -> dict[str, str]:
    """The changes without what hides operators, and so how they round, from a dispatch mode.

    A mode is its thread's alone, and in inference mode it does not see all casts (torch 2.13).
    """
    visible = {name: choice for name, choice in changes.items() if name != "thread"}
    if visible.get("grad_mode") == "inference_mode":
        visible["grad_mode"] = "no_grad"
    return visible


@contextmanager
def _as_before(module: nn.Module, before: StateSnapshot) -> Iterator[None]:
    now = StateSnapshot(module)
    before.restore(counters=True)
    try:
        yield
    finally:
        now.restore(counters=True)
