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
from pytest_torchcompile.fuzz.drawn_call import DrawnCall, Sequence, code
from pytest_torchcompile.fuzz.fuzz_options import FuzzOptions, ran_out
from pytest_torchcompile.fuzz.sizes import varying
from pytest_torchcompile.quantity import count

if TYPE_CHECKING:
    from pytest_torchcompile.fuzz.search import Examined, Result
    from pytest_torchcompile.ledger import Ledger
    from pytest_torchcompile.plan.markers import MarkerLimits
    from pytest_torchcompile.run.counters import HeaviestSequence

__all__ = ["Batches", "compile_shapes", "dim"]

WATCH, FUZZ = "_compile_watch", "_compile_fuzz"
"""The fixtures that a test is given beside its own: its ledger, and the options of the run with its limits."""
_OUTCOMES = frozenset({"Skipped", "XFailed"})
"""What ``pytest.skip`` and ``pytest.xfail`` raise (_pytest/outcomes.py): verdicts on the whole test."""


def dim(min: int | None = None, max: int | None = None, *, multiple_of: int = 1, choices: tuple[int, ...] = (),
        buckets: tuple[int, ...] = ()) -> Dim:
    """A named size: ``dim(1, 512, multiple_of=8)``, ``dim(choices=(4, 8))``, ``dim(buckets=(128, 256))``."""
    return Dim(min=1 if min is None else min, max=max, multiple_of=multiple_of, choices=tuple(choices),
               buckets=tuple(buckets))


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
    named = {name: _dim(name, value) for name, value in dims.items()}
    for name, text in dim_mistakes(named):
        raise UsageError(f"compile_shapes: dim {name!r}: {text}")

    if not flips and not varying(named):
        raise UsageError(f"compile_shapes: {_told(named)}: no dim has more than one size, so no two sequences differ; "
                         "give a range, like B=dim(1, 8)")
    if where is not None and not callable(where):
        raise UsageError(f"compile_shapes: where={where!r}; expected a function of the dims, for example "
                         f"where=lambda {', '.join(named) or 'B'}: ...")

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        drawn = Drawn(test, named, inputs, max_calls, flips, where, [tuple(each) for each in examples or ()])

        @functools.wraps(test)
        def searched(*args: Any, **fixtures: Any) -> None:
            __tracebackhide__ = True
            drawn.run(args, fixtures)

        own = [p for p in inspect.signature(test).parameters.values() if p.name not in ("batches", "sizes")]
        hidden = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (WATCH, FUZZ)]
        del searched.__wrapped__  # pytest would ask it for fixtures
        searched.__signature__ = inspect.Signature([*own, *hidden])  # type: ignore[attr-defined]
        return searched

    return decorate


def _dim(name: str, value: Any) -> Dim:
    if isinstance(value, Dim):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Dim(size=value)
    if isinstance(value, str):
        return Dim(expression=value)
    raise UsageError(f"compile_shapes: {name}={value!r}; expected dim(1, 8), a number, or an expression like 'S + 1'")


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
            for module in self._modules if each.training is not None else ():
                module.train(each.training)
            torch.manual_seed(place)
            with self._ledger.during(repr(each)):
                yield self._inputs(**dict(each.sizes))

    def __repr__(self) -> str:
        return code(self._sequence)


@dataclass(frozen=True)
class Drawn:
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

    def run(self, args: tuple[Any, ...], fixtures: dict[str, Any]) -> None:
        """Search, and raise what the shortest failing sequence raises."""
        __tracebackhide__ = True
        from pytest_torchcompile.fuzz.drawing import shape_sequences, sweep
        from pytest_torchcompile.fuzz.search import search
        from pytest_torchcompile.plugin.fixtures import FuzzCutShortWarning

        ledger, (options, limits, heaviest) = fixtures.pop(WATCH), fixtures.pop(FUZZ)
        runs = _Runs(self, args, fixtures, ledger, limits, heaviest)
        for example in self.examples:
            runs.once(example)
        others = runs.parameter_sizes()
        strategy = shape_sequences(self.dims, self.max_calls, flips=self.flips, where=self.where, others=others)
        found = search(strategy, self.dims, runs.attempt, options.budget(), seed=options.seed,
                       database=options.database(), key=f"{self.test.__module__}:{self.test.__qualname__}",
                       first=sweep(self.dims, self.max_calls, where=self.where, others=others))
        if found.spent == "sizes" and not found.tries:
            raise AssertionError(f"compile_shapes: no sequence was run: {_named(self.where)} is true of no sizes that "
                                 f"were drawn for {_told(self.dims)}; mend the condition, or widen the dims")
        if not found.tries and not self.examples:
            raise AssertionError(f"compile_shapes: no sequence was run: the {found.spent or 'examples'} ran out before "
                                 "the first; give more: --compile-fuzz-seconds")
        if found.finding is None:
            if found.spent:
                place = inspect.unwrap(self.test).__code__
                text = (f"{self.test.__qualname__}: {found.examples} of {count(options.examples, 'sequence')} "
                        f"were run, {ran_out(found.spent)}")
                warnings.warn_explicit(text, FuzzCutShortWarning, place.co_filename, place.co_firstlineno)
            if "batches" in runs.takes and not runs.looked:
                raise AssertionError(f"compile_shapes: {self.test.__qualname__} takes `batches` and looked at none in "
                                     f"{count(runs.ran, 'sequence')}: no size that was drawn was run; iterate over "
                                     "it, as in `for batch in batches: ...`")
            return
        try:
            runs.once(found.sequence)
        except BaseException as error:
            _explain(error, found, options)
            raise
        raise AssertionError(_note(found, options) + "\n(it passed when it was run again: the test depends on "
                             "something that is not put back between sequences)")


class _Runs:
    """Runs the test over one sequence after another, each from the same state."""

    def __init__(self, drawn: Drawn, args: tuple[Any, ...], fixtures: dict[str, Any], ledger: Ledger,
                 limits: MarkerLimits | None, heaviest: HeaviestSequence) -> None:
        from torch import nn

        from pytest_torchcompile.state.snapshot import StateSnapshot

        self.drawn, self.args, self.fixtures, self.ledger, self.limits = drawn, args, fixtures, ledger, limits
        self.heaviest = heaviest
        self.modules = [value for value in fixtures.values() if isinstance(value, nn.Module)]
        self.snapshots = [StateSnapshot(module) for module in self.modules]
        self.flags = [(part, part.training) for module in self.modules for part in module.modules()]
        self.takes = inspect.signature(drawn.test).parameters
        self.ran, self.looked = 0, False
        """Sequences that were run, and whether the test looked at the batches of any."""
        self.failed = False

    def parameter_sizes(self) -> set[int]:
        """Sizes that a dim may collide with: torch gives equal sizes one symbol."""
        return {size for module in self.modules for tensor in module.parameters() for size in tensor.shape}

    def fresh(self) -> None:
        """Forget what was compiled and seen, and put the modules back."""
        from pytest_torchcompile.state.torch_state import forget_compiled

        forget_compiled()
        self.ledger.clear()
        for snapshot in self.snapshots:
            snapshot.restore()
        for part, flag in self.flags:
            part.training = flag

    def once(self, sequence: Sequence) -> None:
        """Run the test over a sequence, and judge its limits; raises what the test raises."""
        __tracebackhide__ = True
        self.fresh()
        given: dict[str, Any] = {}
        batches = None
        if "batches" in self.takes and self.drawn.inputs is not None:
            given["batches"] = batches = Batches(sequence, self.drawn.inputs, self.modules, self.ledger)
        if "sizes" in self.takes:
            given["sizes"] = [dict(each.sizes) for each in sequence]
        self.drawn.test(*self.args, **self.fixtures, **given)
        self.ran += 1
        self.looked = self.looked or (batches is not None and batches.looked)
        if self.limits is not None:
            from pytest_torchcompile.run.counters import judge_limits

            if problems := judge_limits(self.limits, self.ledger, True):
                raise AssertionError("compile_limits: " + "\n\n".join(problems))
        self.heaviest.note(self.ledger)

    def attempt(self, sequence: Sequence) -> Examined:
        """Run the test over a sequence, for the search."""
        from pytest_torchcompile.fuzz.search import Examined, Finding

        found: Finding | None = None
        try:
            self.once(sequence)
        except BaseException as error:
            # What pytest.fail raises is no Exception; nor are a skip and Ctrl-C, which are not ours.
            kind = type(error).__name__
            if self.failed and kind in _OUTCOMES:  # a shorter sequence than one that fails: it fails no less for that
                return Examined(None, len(self.ledger.graphs), 0)
            if not isinstance(error, Exception) and kind != "Failed":
                raise
            self.failed = True
            # Which call it was is not known: the test may run all of them before it asserts.
            found = Finding(type(error).__name__, str(error), len(sequence) - 1)
        return Examined(found, len(self.ledger.graphs), len(sequence))


def _told(dims: Dims) -> str:
    """``B=dim(1, 8), S=dim(choices=(4, 8)), T='S + 1'``: the dims as they are written."""
    return ", ".join(f"{name}={_written(each)}" for name, each in dims.items()) or "no dims"


def _written(each: Dim) -> str:
    if each.size is not None or each.expression is not None:
        return repr(each.expression if each.size is None else each.size)
    if each.listed:
        return f"dim({'buckets' if each.buckets else 'choices'}={each.listed})"
    multiple = f", multiple_of={each.multiple_of}" if each.multiple_of > 1 else ""
    return f"dim({each.min}, {each.max}{multiple})"


def _named(where: Callable[..., bool] | None) -> str:
    """The condition with its place; a lambda has no other name. Without one it is the dims' expressions."""
    if where is None:
        return "what the dims' expressions ask for"
    code_ = getattr(inspect.unwrap(where), "__code__", None)
    place = f" ({os.path.basename(code_.co_filename)}:{code_.co_firstlineno})" if code_ else ""
    return f"where={getattr(where, '__name__', where)}{place}"


def _note(found: Result, options: FuzzOptions) -> str:
    lines = [f"The shortest failing sequence of shapes: {code(found.sequence)}",
             f"  to run it first from now on: compile_shapes(..., examples=[{code(found.sequence)}])"]
    if found.drawn != found.sequence:
        lines.append(f"  found as {code(found.drawn)} in sequence {found.examples}, with {found.tries} tries in all")
    if found.kept:
        lines.append("  kept from an earlier run in .hypothesis")
    if found.spent:
        lines.append(f"  not shrunk to the end: the {found.spent} ran out")
    if options.seed:
        lines.append(f"  seed: --compile-fuzz-seed={options.seed}")
    return "\n".join(lines)


def _explain(error: BaseException, found: Result, options: FuzzOptions) -> None:
    note = _note(found, options)
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
    else:
        error.args = (f"{error}\n{note}", *error.args[1:])
