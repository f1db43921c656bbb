"""An attempt: one drawn sequence, run eagerly and compiled from a fresh compiler state, and everything compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.fuzz.drawn_call import Sequence
from pytest_torchcompile.fuzz.explained import explained_graphs
from pytest_torchcompile.fuzz.search import WORST, Examined, SequenceProblem
from pytest_torchcompile.ledger.records import SILENT, compiled_unit
from pytest_torchcompile.oracle.calls import Call, Make, TrialOptions
from pytest_torchcompile.oracle.discrepancies import find_discrepancies, why_vacuous
from pytest_torchcompile.oracle.leaf_limits import Leaf
from pytest_torchcompile.oracle.trial import Trial
from pytest_torchcompile.oracle.trial_account import Passed
from pytest_torchcompile.state.torch_state import forget_compiled

__all__ = ["Attempts"]

_MILDER = {"error": 5, "eager": 4, "vacuous": 4, "recompiles": 3, "stride": 3, "graph_breaks": 2}
"""Kinds of problems that say nothing of what compiled code computes, with the severity that their check gives them."""

_RAISED = "the compiled call raised"


@dataclass(frozen=True)
class Attempts:
    """What every attempt on one program has in common; calling it with a sequence makes one."""

    make: Make
    """Makes the program anew for each attempt: what it compiled, counted or kept belongs to one history."""
    pristine: nn.Module
    settings: dict[str, Any]
    batch: Callable[[Mapping[str, int], int], Batch]
    """``batch(sizes, seed)``."""
    loss: Callable[..., Any] | None = None
    train: bool = True
    seed: int = 0
    unit: float | None = None
    root: Any = None
    limits: Mapping[str, float] = field(default_factory=dict)
    """``fuzz_recompiles`` and ``graph_breaks``, for each sequence; see :meth:`_too_many_recompiles`."""

    def __call__(self, sequence: Sequence) -> Examined:
        """Run the sequence; the problem is the first wrong result, or else the first thing that is wrong.

        A call that eager refuses has to be refused by compiled code too, and is no fault. Dynamo gives up for good the
        frame in which it meets what the model raises, so that later calls would prove nothing of compiled code: then
        the sequence is run once more, those calls last. Raises :class:`~pytest_torchcompile.errors.UsageError` if the
        inputs cannot be made.
        """
        calls = []
        for index, each in enumerate(sequence):
            sizes = dict(each.sizes)
            # A seed for each call: equal sizes with equal values would hide a graph that keeps its first result.
            calls.append(Call(index, self.batch(sizes, self.seed + index), sizes, training=each.training))
        trial = self._run_calls(calls)
        wrong, compiles = list(_wrong_results(trial)), len(trial.compiled.seen["graphs"])
        reordered = _refused_last(trial)
        if reordered != trial.calls and not wrong:
            trial = self._run_calls(reordered)
            wrong, compiles = list(_wrong_results(trial)), compiles + len(trial.compiled.seen["graphs"])
        # In the drawn order refused calls would break the graph, which is no fault of the compiler's.
        if reordered == trial.calls:
            wrong += self._eager_or_slow(trial)
        # A graph break in an earlier call must not hide wrong numbers: only this one problem is told.
        first = min(wrong, key=_worst_first, default=None)
        if first is not None:
            # Until then all calls matter that ran before it, wherever they were drawn.
            at = max(call.index for call in trial.calls[:first.at + 1])
            first = replace(first, at=at, severity=_severity(first))
        refused = sum(passed.raised for passed in trial.passed)
        mute = sum(_proves_nothing(trial, passed) for passed in trial.passed if not passed.raised)
        return Examined(first, compiles, len(trial.passed) - refused - mute, refused, mute)

    def _run_calls(self, calls: list[Call]) -> Trial:
        """Run calls in their order, from a fresh compiler state."""
        # Without it the graphs of the sequences before would serve this one.
        forget_compiled()
        options = TrialOptions(loss=self.loss, train=self.train, seed=self.seed, unit=self.unit, root=self.root,
                               may_raise=True, passes=1)
        trial = Trial(self.make, self.pristine, self.settings, calls, options)
        trial.run()
        return trial

    def with_backend(self, backend: Any) -> Attempts:
        """The same with another backend; modes and options, which belong to the first, are left out."""
        kept = {name: value for name, value in self.settings.items() if name not in ("mode", "options")}
        return replace(self, settings=kept | {"backend": backend})

    def _eager_or_slow(self, trial: Trial) -> Iterator[SequenceProblem]:
        """What ran eagerly, and what was compiled too often or in too many pieces."""
        seen = _seen_in_accepted(trial)
        compiled = len(seen["graphs"])
        places = _Places(trial)
        for at, passed in enumerate(trial.passed):
            if not passed.graphs and not passed.raised:
                yield SequenceProblem("vacuous", "no compiled code ran", at, "", compiled)
        for frame in seen["eager_frames"]:
            if frame["kind"] in SILENT:
                yield SequenceProblem("eager", f"{frame['function']} silently ran eagerly: {frame['kind']}",
                              places.of_event(frame), f"{frame['file']}:{frame['line']}: {frame['reason']}", compiled)
        yield from self._too_many_breaks(seen["graph_breaks"], places, compiled)
        yield from self._too_many_recompiles(trial, seen["recompiles"], places, compiled)

    def _too_many_breaks(self, breaks: list[Mapping[str, Any]], places: _Places,
                         compiled: int) -> Iterator[SequenceProblem]:
        """A graph break beyond the limit ``graph_breaks``, which is 0 by default."""
        most = self.limits.get("graph_breaks", 0)
        if len(breaks) > most:
            # The first one too many, as breaks stand in the order in which they came.
            over = breaks[int(most)]
            yield SequenceProblem("graph_breaks", f"graph break {int(most) + 1}, {most:g} allowed: {over['reason']}",
                          places.of_event(over), f"{over['file']}:{over['line']}", compiled)

    def _too_many_recompiles(self, trial: Trial, recompiles: list[Mapping[str, Any]], places: _Places,
                             compiled: int) -> Iterator[SequenceProblem]:
        """The first call after which there are more recompiles than allowed.

        By default no more graphs of one function than torch's own rules make of the sizes so far. A limit
        ``fuzz_recompiles`` counts the recompiles of the whole sequence.
        """
        limited = "fuzz_recompiles" in self.limits
        for at, most in enumerate(self._allowed_recompiles(trial)):
            until = [each for each in recompiles if places.by_label.get(each["during"], 0) <= at]
            if limited:
                counted, why = len(until), "allowed"
            else:
                counted, why = _most_of_one_function(until), "explained by the sizes"
            if counted > most:
                # The last is the one that went over.
                last = until[-1]
                lines = map(_recompile_line, until)
                yield SequenceProblem("recompiles", f"{counted} recompile(s) of {last['function']}, {most:g} {why}: "
                              f"{last['cause']}: {last['reason']}", at, "\n".join(lines), compiled)
                return

    def _allowed_recompiles(self, trial: Trial) -> list[float]:
        """How many recompiles there may be after each call."""
        if "fuzz_recompiles" in self.limits:
            return [self.limits["fuzz_recompiles"]] * len(trial.calls)
        dynamic = {None: "auto", False: "static", True: "dynamic"}[self.settings.get("dynamic")]
        modes = [call.trains(self.train) for call in trial.calls]
        # Training and evaluation have graphs of their own.
        histories: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
        for call, mode in zip(trial.calls, modes, strict=True):
            histories[mode].append(_all_sizes(call.batch))
        counts: dict[bool, Iterator[int]] = {}
        for mode, history in histories.items():
            counts[mode] = iter(explained_graphs(dynamic, history))
        made = dict.fromkeys(counts, 0)
        allowed: list[float] = []
        for mode in modes:
            made[mode] = next(counts[mode])
            # The first graph of all is no recompile.
            allowed.append(sum(made.values()) - 1)
        return allowed


class _Places:
    """Where in a trial the calls are that the ledger names by their labels."""

    def __init__(self, trial: Trial) -> None:
        self.by_label = {call.label: at for at, call in enumerate(trial.calls)}
        self._last = len(trial.calls) - 1

    def of_event(self, event: Mapping[str, Any]) -> int:
        """The call during which it was; the last one where the ledger does not say."""
        return self.by_label.get(event.get("during", ""), self._last)


def _severity(problem: SequenceProblem) -> int:
    # Compiled code that takes what eager refuses computes something else; it does not just raise.
    if problem.kind == "error" and not problem.message.startswith(_RAISED):
        return WORST
    return _MILDER.get(problem.kind, WORST)


def _worst_first(problem: SequenceProblem) -> tuple[int, int]:
    return -_severity(problem), problem.at


def _wrong_results(trial: Trial) -> Iterator[SequenceProblem]:
    """What compiled code makes otherwise than eager. The place of a problem is that in ``trial.calls``."""
    compiled = len(trial.compiled.seen["graphs"])
    if error := trial.compiled.error:
        yield SequenceProblem("error", f"{_RAISED} {error}; eager did not", len(trial.passed),
                      f"{error.text}\n{error.traceback}".strip(), compiled)
    for at, call in enumerate(trial.calls):
        for each in find_discrepancies(_leaves_of(trial, call)):
            yield SequenceProblem(each.kind, each.message, at, each.evidence, compiled)


def _refused_last(trial: Trial) -> list[Call]:
    """The calls in an order in which no refused one comes before another."""
    refused = {passed.call.index for passed in trial.passed if passed.raised}
    return sorted(trial.calls, key=lambda call: call.index in refused)


def _proves_nothing(trial: Trial, passed: Passed) -> bool:
    """Whether a call's equality proves nothing."""
    return (passed.zero and not passed.gradients) or bool(why_vacuous(_leaves_of(trial, passed.call)))


def _leaves_of(trial: Trial, call: Call) -> list[tuple[str, Leaf]]:
    return [labelled for labelled in trial.leaves if labelled[0] == call.label]


def _seen_in_accepted(trial: Trial) -> dict[str, Any]:
    """What the ledger saw, without calls that eager refuses: where the model raises, Dynamo breaks the graph."""
    refused = {passed.call.label for passed in trial.passed if passed.raised}
    seen = dict(trial.compiled.seen)
    for name in ("graph_breaks", "recompiles", "eager_frames"):
        seen[name] = [each for each in seen[name] if each.get("during") not in refused]
    return seen


def _recompile_line(recompile: Mapping[str, Any]) -> str:
    place = f"{recompile['function']} {recompile['file']}:{recompile['line']}"
    return f"{recompile['during']}: {place}  {recompile['reason']}"


def _most_of_one_function(recompiles: list[Mapping[str, Any]]) -> int:
    return max(Counter(map(compiled_unit, recompiles)).values(), default=0)


def _all_sizes(batch: Batch) -> tuple[int, ...]:
    """Every size of every input, and the whole numbers among them, which torch treats as sizes."""
    sizes: list[int] = []
    for leaf in torch.utils._pytree.tree_leaves((batch.args, batch.kwargs)):
        if isinstance(leaf, torch.Tensor):
            sizes += leaf.shape
        # Not a bool, which torch guards on by its value.
        elif type(leaf) is int:
            sizes.append(leaf)
    return tuple(sizes)
