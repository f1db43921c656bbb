"""@compile_shapes: run a test of a model repository over drawn sequences of shapes."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.dims import Dim, Dims, dim_mistakes
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.drawn_call import DrawnCall, Sequence, as_code, varying_dims
from pytest_torchcompile.fuzz.fuzz_options import FuzzOptions, ran_out
from pytest_torchcompile.quantity import count

if TYPE_CHECKING:
    from pytest_torchcompile.fuzz.search import Examined, Result
    from pytest_torchcompile.ledger import Ledger
    from pytest_torchcompile.plan.markers import MarkerLimits
    from pytest_torchcompile.run.counters import HeaviestSequence

__all__ = ["FUZZ", "Batches", "compile_shapes", "dim", "read_dim"]

WATCH, FUZZ = "_compile_watch", "_compile_fuzz"
"""The fixtures that a test is given beside its own: its ledger, and the options of the run with its limits."""
_OUTCOMES = frozenset({"Skipped", "XFailed"})
"""What ``pytest.skip`` and ``pytest.xfail`` raise (_pytest/outcomes.py): verdicts on the whole test."""


def dim(min: int | None = None, max: int | None = None, *, multiple_of: int = 1, choices: tuple[int, ...] = (),
        buckets: tuple[int, ...] = ()) -> Dim:
    """A named size: ``dim(1, 512, multiple_of=8)``, ``dim(choices=(4, 8))``, ``dim(buckets=(128, 256))``."""
    if min is None:
        min = 1
    return Dim(min=min, max=max, multiple_of=multiple_of, choices=tuple(choices), buckets=tuple(buckets))


def compile_shapes(
    *,
    inputs: Callable[..., Any] | None = None,
    max_calls: int = 6,
    flips: bool = False,
    where: Callable[..., bool] | None = None,
    examples: list[list[DrawnCall]] | None = None,
    **dims: Dim | int | str,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test over drawn sequences of sizes, and report the shortest one that fails.

    The test takes ``batches``, which gives ``inputs(**sizes)`` for each call of the sequence, or ``sizes``, a list of
    dicts, beside its fixtures. Before each sequence torch forgets what it compiled, the modules among the fixtures
    get back their parameters, buffers and training flag, and the ledger behind ``recompile_counter`` and
    ``graph_breaks`` is empty. A marker ``compile_limits`` is judged after each sequence.

    Args:
        inputs: Makes a batch; called with the dims as keywords.
        max_calls: The longest sequence.
        flips: Whether modules are also switched between training and evaluation.
        where: Called with the dims as keywords: do these sizes belong together?
        examples: Sequences to run first, as the report prints them: ``[[call(B=2), call(B=3)]]``.
        **dims: Each a :func:`dim`, a number, or an expression of others, such as ``T="S + 1"``.

    Raises :class:`~pytest_torchcompile.errors.UsageError` for dims without sizes, if no dim has more than one and there
    are no flips, and if the test takes neither. A test fails that takes ``batches`` and looks at none, in any sequence,
    and so does one with a ``where`` that nothing satisfies.
    """
    named = {name: read_dim("compile_shapes", name, value) for name, value in dims.items()}
    for name, text in dim_mistakes(named):
        raise UsageError(f"compile_shapes: dim {name!r}: {text}")

    if not flips and not varying_dims(named):
        raise UsageError(f"compile_shapes: {_dims_text(named)}: no dim has more than one size, so no two sequences "
                         "differ; give a range, like B=dim(1, 8)")
    if where is not None and not callable(where):
        raise UsageError(f"compile_shapes: where={where!r}; expected a function of the dims, for example "
                         f"where=lambda {', '.join(named) or 'B'}: ...")

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        sequences = [tuple(each) for each in examples or ()]
        fuzzed = FuzzedTest(test, named, inputs, max_calls, flips, where, sequences)

        @functools.wraps(test)
        def searched(*args: Any, **fixtures: Any) -> None:
            __tracebackhide__ = True
            fuzzed.run_sequences(args, fixtures)

        # What pytest takes for the test's fixtures.
        parameters = inspect.signature(test).parameters.values()
        own = [parameter for parameter in parameters if parameter.name not in ("batches", "sizes")]
        hidden = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (WATCH, FUZZ)]
        # pytest would ask it for fixtures instead.
        del searched.__wrapped__
        searched.__signature__ = inspect.Signature([*own, *hidden])  # type: ignore[attr-defined]
        return searched

    return decorate


def read_dim(caller: str, name: str, value: Any) -> Dim:
    """A dim as somebody has written it. Raises UsageError, which names the caller."""
    if isinstance(value, Dim):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Dim(size=value)
    if isinstance(value, str):
        return Dim(expression=value)
    raise UsageError(f"{caller}: {name}={value!r}; expected dim(1, 8), a number, or an expression like 'S + 1'")


class Batches:
    """The batches of one sequence, each made when it is its turn; ``len()`` of it is the number of calls."""

    def __init__(self, sequence: Sequence, inputs: Callable[..., Any], modules: list[Any], ledger: Ledger) -> None:
        self._sequence, self._inputs, self._modules, self._ledger = sequence, inputs, modules, ledger
        self.looked = False
        """Was any batch asked for?"""

    def __len__(self) -> int:
        return len(self._sequence)

    def __iter__(self) -> Iterator[Any]:
        import torch

        self.looked = True
        for place, each in enumerate(self._sequence):
            if each.training is not None:
                for module in self._modules:
                    module.train(each.training)
            # So a batch does not depend on the calls before it, which the search may drop.
            torch.manual_seed(place)
            with self._ledger.during(repr(each)):
                yield self._inputs(**dict(each.sizes))

    def __repr__(self) -> str:
        return as_code(self._sequence)


@dataclass(frozen=True)
class FuzzedTest:
    """A test with the sequences that it is run over."""

    test: Callable[..., Any]
    dims: Dims
    inputs: Callable[..., Any] | None
    max_calls: int
    flips: bool
    where: Callable[..., bool] | None
    examples: list[Sequence]

    def __post_init__(self) -> None:
        taken = inspect.signature(self.test).parameters
        if "batches" not in taken and "sizes" not in taken:
            raise UsageError(f"compile_shapes: {self.test.__qualname__} takes neither `batches` nor `sizes`; "
                             "it would not see what was drawn")
        if "batches" in taken and self.inputs is None:
            raise UsageError(f"compile_shapes: {self.test.__qualname__} takes `batches`, and nothing makes them: "
                             "give inputs=, a function of the dims")

    def run_sequences(self, args: tuple[Any, ...], fixtures: dict[str, Any]) -> None:
        """Search, and raise what the shortest failing sequence raises."""
        __tracebackhide__ = True
        from pytest_torchcompile.fuzz.drawn_call import shape_sequences, sweep
        from pytest_torchcompile.fuzz.search import search

        ledger, (options, limits, heaviest) = fixtures.pop(WATCH), fixtures.pop(FUZZ)
        runs = _SequenceRuns(self, args, fixtures, ledger, limits, heaviest)
        for example in self.examples:
            runs.run_once(example)
        others = runs.parameter_sizes()
        strategy = shape_sequences(self.dims, self.max_calls, flips=self.flips, where=self.where, others=others)
        result = search(strategy, self.dims, runs.examine, options.budget(), seed=options.seed,
                       database=options.database(), key=f"{self.test.__module__}:{self.test.__qualname__}",
                       first=sweep(self.dims, self.max_calls, where=self.where, others=others))
        self._refuse_nothing_run(result)
        if result.worst is None:
            self._warn_if_cut_short(result, options)
            runs.refuse_unread_batches()
            return
        try:
            runs.run_once(result.sequence)
        except BaseException as error:
            # As a note, so that pytest shows the test's own traceback, with what was called below it.
            _add_note(error, result, options)
            raise
        raise AssertionError(_failure_note(result, options) + "\n(it passed when it was run again: the test depends on "
                             "something that is not put back between sequences)")

    def _refuse_nothing_run(self, result: Result) -> None:
        """A test that ran over no sequence has shown nothing."""
        __tracebackhide__ = True
        if result.tries:
            return
        if result.spent == "sizes":
            condition = _condition_text(self.where)
            raise AssertionError(f"compile_shapes: no sequence was run: {condition} is true of no sizes that were "
                                 f"drawn for {_dims_text(self.dims)}; mend the condition, or widen the dims")
        if not self.examples:
            raise AssertionError(f"compile_shapes: no sequence was run: the {result.spent or 'examples'} ran out "
                                 "before the first; give more: --compile-fuzz-seconds")

    def _warn_if_cut_short(self, result: Result, options: FuzzOptions) -> None:
        __tracebackhide__ = True
        from pytest_torchcompile.plugin.fixtures import FuzzCutShortWarning

        if result.spent:
            place = inspect.unwrap(self.test).__code__
            text = (f"{self.test.__qualname__}: {result.examples} of {count(options.examples, 'sequence')} were run, "
                    f"{ran_out(result.spent)}")
            warnings.warn_explicit(text, FuzzCutShortWarning, place.co_filename, place.co_firstlineno)


class _SequenceRuns:
    """Runs the test over one sequence after another, each from the same state."""

    def __init__(self, fuzzed: FuzzedTest, args: tuple[Any, ...], fixtures: dict[str, Any], ledger: Ledger,
                 limits: MarkerLimits | None, heaviest: HeaviestSequence) -> None:
        from torch import nn

        from pytest_torchcompile.state.snapshot import StateSnapshot

        self.fuzzed, self.args, self.fixtures, self.ledger, self.limits = fuzzed, args, fixtures, ledger, limits
        self.heaviest = heaviest
        self.modules = [value for value in fixtures.values() if isinstance(value, nn.Module)]
        self.snapshots = [StateSnapshot(module) for module in self.modules]
        self.flags: list[tuple[nn.Module, bool]] = []
        for module in self.modules:
            self.flags += [(part, part.training) for part in module.modules()]
        self.takes = inspect.signature(fuzzed.test).parameters
        self.ran, self.looked = 0, False
        """Sequences that were run, and whether the test looked at the batches of any."""
        self.failed = False
        self.over_limits = False
        """Did the last sequence go over the limits of the test's marker, its body having passed?"""

    def parameter_sizes(self) -> set[int]:
        """Sizes that a dim may collide with: torch gives equal sizes one symbol."""
        sizes: set[int] = set()
        for module in self.modules:
            for parameter in module.parameters():
                sizes.update(parameter.shape)
        return sizes

    def refuse_unread_batches(self) -> None:
        """A test that takes batches and looks at none has shown nothing."""
        __tracebackhide__ = True
        if "batches" in self.takes and not self.looked:
            raise AssertionError(f"compile_shapes: {self.fuzzed.test.__qualname__} takes `batches` and looked at none "
                                 f"in {count(self.ran, 'sequence')}: no size that was drawn was run; iterate over it, "
                                 "as in `for batch in batches: ...`")

    def start_fresh(self) -> None:
        """Forget what was compiled and seen, and put the modules back."""
        from pytest_torchcompile.state.torch_state import forget_compiled

        forget_compiled()
        self.ledger.clear()
        for snapshot in self.snapshots:
            snapshot.restore()
        # The attribute, not train(): parts of one module may differ.
        for part, flag in self.flags:
            part.training = flag

    def run_once(self, sequence: Sequence) -> None:
        """Run the test over a sequence, and judge its limits; raises what the test raises."""
        __tracebackhide__ = True
        self.start_fresh()
        self.over_limits = False
        given: dict[str, Any] = {}
        batches = None
        if "batches" in self.takes and self.fuzzed.inputs is not None:
            given["batches"] = batches = Batches(sequence, self.fuzzed.inputs, self.modules, self.ledger)
        if "sizes" in self.takes:
            given["sizes"] = [dict(each.sizes) for each in sequence]
        self.fuzzed.test(*self.args, **self.fixtures, **given)
        self.ran += 1
        self.looked = self.looked or (batches is not None and batches.looked)
        if self.limits is not None:
            from pytest_torchcompile.run.counters import judge_limits

            if problems := judge_limits(self.limits, self.ledger, True):
                self.over_limits = True
                raise AssertionError("compile_limits: " + "\n\n".join(problems))
        self.heaviest.note(self.ledger)

    def examine(self, sequence: Sequence) -> Examined:
        """Run the test over a sequence, for the search."""
        from pytest_torchcompile.fuzz.search import WORST, Examined, SequenceProblem

        problem: SequenceProblem | None = None
        try:
            self.run_once(sequence)
        except BaseException as error:
            kind = type(error).__name__
            if self.failed and kind in _OUTCOMES:
                # A shorter sequence than one that fails: it fails no less for that.
                return Examined(None, len(self.ledger.graphs), 0)
            # What pytest.fail raises is no Exception; nor are a skip and Ctrl-C, which are not ours.
            if not isinstance(error, Exception) and kind != "Failed":
                raise
            self.failed = True
            # What the body asserts may be numbers; a limit is milder, and the search goes on after it.
            severity = WORST
            if self.over_limits:
                kind, severity = "compile_limits", WORST - 1
            # Which call it was is not known: the test may run all of them before it asserts.
            problem = SequenceProblem(kind, str(error), len(sequence) - 1, severity=severity)
        return Examined(problem, len(self.ledger.graphs), len(sequence))


def _dims_text(dims: Dims) -> str:
    """``B=dim(1, 8), S=dim(choices=(4, 8)), T='S + 1'``: the dims as they are written."""
    return ", ".join(f"{name}={_dim_text(each)}" for name, each in dims.items()) or "no dims"


def _dim_text(each: Dim) -> str:
    if each.size is not None:
        return repr(each.size)
    if each.expression is not None:
        return repr(each.expression)
    if each.buckets:
        return f"dim(buckets={each.listed})"
    if each.listed:
        return f"dim(choices={each.listed})"
    if each.multiple_of > 1:
        return f"dim({each.min}, {each.max}, multiple_of={each.multiple_of})"
    return f"dim({each.min}, {each.max})"


def _condition_text(where: Callable[..., bool] | None) -> str:
    """The condition with its place; a lambda has no other name. Without one it is the dims' expressions."""
    if where is None:
        return "what the dims' expressions ask for"
    code_ = getattr(inspect.unwrap(where), "__code__", None)
    place = f" ({os.path.basename(code_.co_filename)}:{code_.co_firstlineno})" if code_ is not None else ""
    return f"where={getattr(where, '__name__', where)}{place}"


def _failure_note(result: Result, options: FuzzOptions) -> str:
    worst, *milder = result.worst_first
    lines = [f"The shortest failing sequence of shapes: {as_code(worst.sequence)}",
             f"  to run it first from now on: compile_shapes(..., examples=[{as_code(worst.sequence)}])"]
    if worst.drawn != worst.sequence:
        drawn = as_code(worst.drawn)
        lines.append(f"  found as {drawn}, with {result.examples} sequences and {result.tries} tries in all")
    if worst.kept:
        lines.append("  kept from an earlier run in .hypothesis")
    if worst.cut:
        lines.append(f"  not shrunk to the end: the {worst.cut} ran out")
    for failing in milder:
        lines.append(f"  and, which is milder, after {as_code(failing.sequence)}: {failing.problem.message}")
    if options.seed:
        lines.append(f"  seed: --compile-fuzz-seed={options.seed}")
    return "\n".join(lines)


def _add_note(error: BaseException, result: Result, options: FuzzOptions) -> None:
    note = _failure_note(result, options)
    # From Python 3.11.
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = (f"{error}\n{note}", *error.args[1:])
