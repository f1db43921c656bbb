"""What the fixtures hand to a test: views of one ledger, and how its limits are judged. No pytest, no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from pytest_torchcompile.ledger import explain
from pytest_torchcompile.ledger.ledger import Ledger
from pytest_torchcompile.ledger.records import SILENT, Compile, EagerFrame, GraphBreak
from pytest_torchcompile.plan.markers import MarkerLimits
from pytest_torchcompile.quantity import count

if TYPE_CHECKING:
    from types import TracebackType

    from pytest_torchcompile.layer.shape_stabilizer import ShapeStabilizer

__all__ = ["Evidence", "GraphBreaks", "HeaviestSequence", "ModelCalls", "RecompileCounter", "ShapeBuckets",
           "judge_limits", "never_ran", "ran_eagerly"]


@dataclass(frozen=True)
class ModelCalls:
    """Of the model that ``compiled_model`` compiled: was it called, and did a compiled graph run in its calls?"""

    called: bool
    ran: bool


@dataclass(frozen=True)
class Evidence:
    """What a test is judged by, beside what its own body says: in the run, and again from the report."""

    ledger: Ledger
    limits: MarkerLimits | None
    """Of its markers; None where it has none."""
    must_run: bool
    """Does a test in which no compiled graph ran go over its limits?"""
    asks_model: bool
    """Does it take ``compiled_model`` itself, so that it has to run it?"""
    model: ModelCalls | None
    """None where any graph will do: see :func:`never_ran`."""

    def problem(self) -> str:
        """Why the test can't pass, whatever its body says; empty where it can."""
        asks = self.asks_model
        if self.limits is not None:
            if problems := judge_limits(self.limits, self.ledger, self.must_run):
                return "compile_limits: " + "\n\n".join(problems)
            # Whoever allows eager frames may mean all of the model.
            if self.limits.eager_frames and self.ledger.eager_frames:
                asks = False
        if not asks:
            return ""
        return never_ran(self.ledger, self.model)


class HeaviestSequence:
    """Of the sequences of a fuzzed test the one that compiled most: its ledger is what the report holds."""

    def __init__(self) -> None:
        self.sequences = 0
        self.ledger: Ledger | None = None
        """A copy: the test's own is emptied before each sequence."""
        self._weight: tuple[int, ...] = ()

    def note(self, ledger: Ledger) -> None:
        """A sequence has passed."""
        self.sequences += 1
        weight = (len(ledger.recompiles), len(ledger.graph_breaks), len(ledger.eager_frames), len(ledger.compiles))
        # Recompiles weigh most, for they are what a fuzzed test is about.
        if self.ledger is None or weight > self._weight:
            self.ledger, self._weight = Ledger.from_dict(ledger.to_dict()), weight


class RecompileCounter:
    """What torch.compile compiled in this test so far."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.unused: list[str] = []
        """Expectations that were made and not entered: ``with`` was forgotten."""
        self.trusted = False
        """Whether the test read a number that means nothing if nothing ran compiled, and did not look if it did."""

    @property
    def count(self) -> int:
        """Number of recompiles: compiles because the guards of an earlier one failed."""
        return len(self.recompiles)

    @property
    def recompiles(self) -> list[Compile]:
        """The recompiles, in order of time."""
        self.trusted = True
        return list(self._ledger.recompiles)

    @property
    def compiles(self) -> list[Compile]:
        """All compiles, in order of time: first ones, recompiles, resume functions, backwards."""
        self.trusted = False
        return list(self._ledger.compiles)

    def explain(self, allowed: int | None = None) -> str:
        """Each recompile in words: old -> new value, guard, place, what to try; ``allowed`` is told in the title."""
        return _with_title(explain.recompiles(self._ledger.recompiles, allowed or 0), allowed)

    def expect(self, n: int) -> _Expectation:
        """``with recompile_counter.expect(1):`` fails unless the block recompiles exactly ``n`` times.

        It fails, too, where the number would prove nothing: no compiled graph ran in the block, or torch gave
        up and ran a frame eagerly (recompile limit, suppressed error, stance, compiler off).
        """
        __tracebackhide__ = True
        # Somebody without a type checker may give anything.
        given: object = n
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise ValueError(f"expect({n!r}); expected a whole number from 0 on")
        return self._expectation(f"expect({n})", n)

    def assert_no_recompiles(self) -> _Expectation:
        """``with recompile_counter.assert_no_recompiles():`` is :meth:`expect` of 0."""
        return self._expectation("assert_no_recompiles()", 0)

    def _expectation(self, call: str, n: int) -> _Expectation:
        self.unused.append(call)
        return _Expectation(self._ledger, n, lambda: self.unused.remove(call))

    def __repr__(self) -> str:
        return f"<{self.count} recompiles, {len(self._ledger.compiles)} compiles>"


class GraphBreaks(Sequence[GraphBreak]):
    """The places where a graph broke in this test so far; equals a list of the same records."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.trusted = False
        """Whether the test looked; that there are none means nothing if nothing ran compiled."""

    @overload
    def __getitem__(self, index: int) -> GraphBreak: ...
    @overload
    def __getitem__(self, index: slice) -> list[GraphBreak]: ...
    def __getitem__(self, index: int | slice) -> GraphBreak | list[GraphBreak]:
        self.trusted = True
        return self._ledger.graph_breaks[index]

    def __len__(self) -> int:
        self.trusted = True
        return len(self._ledger.graph_breaks)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, GraphBreaks):
            other = list(other)
        return list(self) == other

    def explain(self, allowed: int | None = None) -> str:
        """Each break in words: reason, place, whose code, torch's hint; ``allowed`` is told in the title."""
        return _with_title(explain.graph_breaks(self._ledger.graph_breaks, allowed or 0), allowed)

    def __repr__(self) -> str:
        places = ", ".join(f"{graph_break.file}:{graph_break.line}" for graph_break in self._ledger.graph_breaks)
        return f"<graph breaks: {places or 'none'}>"


class ShapeBuckets:
    """The sizes that the test runs through."""

    def __init__(self, sizes: tuple[int, ...], ledger: Ledger) -> None:
        self.sizes = sizes
        """From the marker ``shape_buckets``, or those of a plain ``BucketConfig``."""
        self._ledger = ledger

    @property
    def stabilizer(self) -> ShapeStabilizer:
        """A ``ShapeStabilizer`` that pads to these sizes."""
        from pytest_torchcompile.layer.shape_stabilizer import ShapeStabilizer

        return ShapeStabilizer(self.sizes)

    def batches(self, make: Callable[..., Any]) -> Iterator[Any]:
        """Yield what ``make`` returns for each size, smallest first.

        Called as ``make(S=size)`` where it has a parameter ``S`` (or takes any keyword, and nothing by place), else
        as ``make(size)``. What happens while a batch is in use is told as happening during ``S=...``.

        Raises :class:`TypeError` at once if ``make`` can't be called so.
        """
        # Checked here, and not in the generator, which would raise at its first batch.
        return self._make_batches(_call_by_size(make))

    def _make_batches(self, make: Callable[[int], Any]) -> Iterator[Any]:
        for size in self.sizes:
            with self._ledger.during(f"S={size}"):
                yield make(size)

    def __repr__(self) -> str:
        return f"<shape buckets {', '.join(map(str, self.sizes))}>"


def judge_limits(limits: MarkerLimits, ledger: Ledger, must_run: bool) -> list[str]:
    """Return a text for each limit that does not hold.

    Frames that ran eagerly without the user's wish (recompile limit, suppressed error, stance, compiler off) fail
    any limit unless ``eager_frames`` allows them, for they make the other numbers smaller than the truth. With
    ``must_run`` a test in which no compiled graph ran fails as well, unless it may run eagerly.
    """
    problems = []
    if limits.recompiles is not None and len(ledger.recompiles) > limits.recompiles:
        problems.append(explain.recompiles(ledger.recompiles, limits.recompiles))
    if limits.graph_breaks is not None and len(ledger.graph_breaks) > limits.graph_breaks:
        problems.append(explain.graph_breaks(ledger.graph_breaks, limits.graph_breaks))
    if limits.eager_frames is None:
        problems += _silent_problems(ledger.eager_frames)
    elif len(ledger.eager_frames) > limits.eager_frames:
        title, *lines = explain.eager_frames(ledger.eager_frames).splitlines()
        problems.append("\n".join([f"{title}, {limits.eager_frames or 'none'} allowed", *lines]))
    # Whoever allows eager frames may mean all of the test.
    may_be_eager = limits.eager_frames and ledger.eager_frames
    if not problems and must_run and not may_be_eager and not ledger.graph_runs:
        problems.append("nothing to judge: no compiled graph ran in this test" + _eager_frames_text(ledger))
    return problems + _lost_records(ledger)


def never_ran(ledger: Ledger, model: ModelCalls | None) -> str:
    """Why a test that asked for a compiled model proves nothing about it; empty where it may.

    A call that raised is what a test may be about. ``model``: what is known of calls of that very model; None where
    a wrapper of the user's may have made anything of it, and any graph will do.
    """
    if ledger.raised or ledger.failures:
        return ""
    # A graph that ran is the proof; a graph that was compiled may have been thrown away since.
    any_ran = ledger.graph_runs > 0
    if any_ran and (model is None or model.ran):
        return ""
    nothing_ran = "compiled_model was called, but nothing of it ran compiled: no graph ran in"
    if any_ran and model and model.called:
        return f"{nothing_ran} its calls{_eager_frames_text(ledger)}"
    if ledger.eager_frames and not any_ran:
        return f"{nothing_ran} this test{_eager_frames_text(ledger)}"
    return ("compiled_model was never called, so this test says nothing about it; call it, or take the fixture "
            "`model` instead")


def ran_eagerly(ledger: Ledger, counter: RecompileCounter | None, breaks: GraphBreaks | None) -> str:
    """What makes a test say less than it seems to, without being wrong: a text, or an empty one."""
    silent = _silent_frames(ledger.eager_frames)
    if silent:
        text = explain.eager_frames(silent)
        return _retitled(f"{text.splitlines()[0]} though meant to be compiled, and torch did not raise "
                         f"(compile_limits(eager_frames={len(ledger.eager_frames)}) allows it)", text)
    if ledger.graph_runs or ledger.raised or ledger.failures or ledger.graph_breaks:
        return ""
    # Only where the test asked for the number: a fixture that nobody looks at promises nothing.
    if counter and counter.trusted:
        return "recompile_counter was asked, but no compiled graph ran in this test: its 0 proves nothing"
    if breaks is not None and breaks.trusted:
        return "graph_breaks was asked, but no compiled graph ran in this test: that it is empty proves nothing"
    return ""


class _Expectation:
    """The number of recompiles that a block must have."""

    def __init__(self, ledger: Ledger, expected: int, entered: Callable[[], None]) -> None:
        self._ledger, self._expected, self._entered = ledger, expected, entered
        self._new = True

    def __enter__(self) -> None:
        # It may be entered again.
        if self._new:
            self._entered()
        self._new = False
        self._recompiles, self._runs = len(self._ledger.recompiles), self._ledger.graph_runs
        self._calls = {id(frame): frame.calls for frame in self._ledger.eager_frames}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        __tracebackhide__ = True
        # An exception of the block's own says more than what is missing for it.
        problems = self._find_problems() if kind is None else []
        if problems:
            raise AssertionError("\n\n".join(problems))

    def _find_problems(self) -> list[str]:
        recompiles = self._ledger.recompiles[self._recompiles :]
        problems = []
        if len(recompiles) != self._expected:
            text = explain.recompiles(recompiles, self._expected)
            # Of none allowed the title says so by itself; of some it says how many are allowed, not expected.
            if self._expected:
                text = _retitled(f"{count(len(recompiles), 'recompile')}, {self._expected} expected", text)
            problems.append(text)
        frames = []
        for frame in self._ledger.eager_frames:
            # A frame that ran eagerly before the block counts only if it was called in it again.
            if frame.calls > self._calls.get(id(frame), 0):
                frames.append(frame)
        problems += _silent_problems(frames)
        if not problems and self._ledger.graph_runs == self._runs:
            problems.append("no compiled graph ran in the block, so that its recompiles prove nothing"
                            + _eager_frames_text(self._ledger))
        return problems + _lost_records(self._ledger)


def _with_title(text: str, allowed: int | None) -> str:
    """The text; where nobody has said how many are allowed, its title does not either."""
    if allowed is not None:
        return text
    title = text.splitlines()[0]
    return _retitled(title.partition(",")[0], text)


def _retitled(title: str, text: str) -> str:
    return "\n".join([title, *text.splitlines()[1:]])


def _silent_frames(frames: Sequence[EagerFrame]) -> list[EagerFrame]:
    return [frame for frame in frames if frame.kind in SILENT]


def _silent_problems(frames: Sequence[EagerFrame]) -> list[str]:
    silent = _silent_frames(frames)
    if not silent:
        return []
    text = explain.eager_frames(silent)
    title = f"torch gave up compiling, so that the other numbers are too small: {text.splitlines()[0]}"
    return [_retitled(title, text)]


def _eager_frames_text(ledger: Ledger) -> str:
    if not ledger.eager_frames:
        return ""
    return "\n" + explain.eager_frames(ledger.eager_frames)


def _lost_records(ledger: Ledger) -> list[str]:
    if not ledger.lost:
        return []
    return ["not all that torch did could be read (a newer torch than pytest-torchcompile knows?), and the numbers may "
            "be too small: " + "; ".join(ledger.lost)]


def _call_by_size(make: Callable[..., Any]) -> Callable[[int], Any]:
    """``make`` as a function of the size alone, which it gets as ``S=size`` or by place."""
    name = getattr(make, "__name__", repr(make))
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        # Written in C.
        return make
    by_keyword = _takes_keyword(signature)
    try:
        # Tried without a call: a factory that lacks an argument would fail in the middle of the loop.
        signature.bind(S=1) if by_keyword else signature.bind(1)
    except TypeError as error:
        call = f"{name}(S=size)" if by_keyword else f"{name}(size)"
        raise TypeError(f"shape_buckets.batches calls {call}: {error}; "
                        "functools.partial gives it what else it needs") from None
    if by_keyword:
        return lambda size: make(S=size)
    return make


def _takes_keyword(signature: inspect.Signature) -> bool:
    """Whether a size is given as ``S=size``."""
    by_place = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD,
                inspect.Parameter.VAR_POSITIONAL}
    named = signature.parameters.get("S")
    if named is not None:
        return named.kind in (named.KEYWORD_ONLY, named.POSITIONAL_OR_KEYWORD)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds and by_place.isdisjoint(kinds)
