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
from pytest_torchcompile.fuzz.explained import graphs
from pytest_torchcompile.fuzz.search import Examined, Finding
from pytest_torchcompile.ledger.records import SILENT, compiled_unit
from pytest_torchcompile.oracle.calls import Call, Make, Passed, TrialOptions
from pytest_torchcompile.oracle.discrepancies import find_discrepancies, why_vacuous
from pytest_torchcompile.oracle.leaf import Leaf
from pytest_torchcompile.oracle.trial import Trial
from pytest_torchcompile.state.torch_state import forget_compiled

__all__ = ["Attempts"]


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
    """``fuzz_recompiles`` and ``graph_breaks``, for each sequence; see :meth:`_over`."""

    def __call__(self, sequence: Sequence) -> Examined:
        """Run the sequence; the finding is the first thing that is wrong.

        A call that eager refuses has to be refused by compiled code too, and is no fault. Dynamo gives up for good the
        frame in which it meets what the model raises, so that later calls would prove nothing of compiled code: then
        the sequence is run once more, those calls last. Raises :class:`~pytest_torchcompile.errors.UsageError` if the
        inputs cannot be made.
        """
        trial = self._trial([Call(k, self.batch(dict(each.sizes), self.seed + k), dict(each.sizes),
                                  training=each.training) for k, each in enumerate(sequence)])
        found, compiles = list(self._wrong(trial)), len(trial.compiled.seen["graphs"])
        if (calls := _refused_last(trial)) != trial.calls and not found:
            trial = self._trial(calls)
            found, compiles = list(self._wrong(trial)), compiles + len(trial.compiled.seen["graphs"])
        if calls == trial.calls:
            found += self._eager_or_slow(trial)
        first = min(found, key=lambda each: each.at, default=None)
        if first is not None:  # until then all calls matter that ran before it
            first = replace(first, at=max(call.index for call in trial.calls[:first.at + 1]))
        refused = sum(passed.raised for passed in trial.passed)
        mute = sum(_mute(trial, passed) for passed in trial.passed if not passed.raised)
        return Examined(first, compiles, len(trial.passed) - refused - mute, refused, mute)

    def _trial(self, calls: list[Call]) -> Trial:
        """Run calls in their order, from a fresh compiler state."""
        forget_compiled()
        options = TrialOptions(loss=self.loss, train=self.train, seed=self.seed, unit=self.unit, root=self.root,
                               may_raise=True, passes=1)
        trial = Trial(self.make, self.pristine, self.settings, calls, options)
        trial.run()
        return trial

    def on(self, backend: Any) -> Attempts:
        """The same with another backend; modes and options, which belong to the first, are left out."""
        kept = {k: v for k, v in self.settings.items() if k not in ("mode", "options")}
        return Attempts(**{**self.__dict__, "settings": kept | {"backend": backend}})

    def _wrong(self, trial: Trial) -> Iterator[Finding]:
        """What compiled code makes otherwise than eager. The place of a finding is that in ``trial.calls``."""
        compiled = len(trial.compiled.seen["graphs"])
        if error := trial.compiled.error:
            yield Finding("error", f"the compiled call raised {error}; eager did not", len(trial.passed),
                          f"{error.text}\n{error.traceback}".strip(), compiled)
        for at, call in enumerate(trial.calls):
            for found in find_discrepancies(_of(trial, call)):
                yield Finding(found.kind, found.message, at, found.evidence, compiled)

    def _eager_or_slow(self, trial: Trial) -> Iterator[Finding]:
        seen = _of_what_ran(trial)
        compiled = len(seen["graphs"])
        place = {call.label: at for at, call in enumerate(trial.calls)}
        for at, passed in enumerate(trial.passed):
            if not passed.graphs and not passed.raised:
                yield Finding("vacuous", "no compiled code ran", at, "", compiled)
        for frame in seen["eager_frames"]:
            if frame["kind"] in SILENT:
                at = place.get(frame.get("during", ""), len(trial.calls) - 1)
                yield Finding("eager", f"{frame['function']} silently ran eagerly: {frame['kind']}", at,
                              f"{frame['file']}:{frame['line']}: {frame['reason']}", compiled)
        yield from self._over(trial, seen, place, compiled)

    def _over(self, trial: Trial, seen: Mapping[str, Any], place: Mapping[str, int],
              compiled: int) -> Iterator[Finding]:
        """Graph breaks and recompiles beyond the limits.

        By default no break, and no more graphs of one function than torch's own rules make of the sizes so far. A limit
        ``fuzz_recompiles`` counts the recompiles of the whole sequence.
        """
        breaks = seen["graph_breaks"]
        if len(breaks) > (most := self.limits.get("graph_breaks", 0)):
            over = breaks[int(most)]
            yield Finding("graph_breaks", f"graph break {int(most) + 1}, {most:g} allowed: {over['reason']}",
                          place.get(over.get("during", ""), len(trial.calls) - 1),
                          f"{over['file']}:{over['line']}", compiled)
        allowed = self._allowed(trial)
        for at, most in enumerate(allowed):
            until = [r for r in seen["recompiles"] if place.get(r["during"], 0) <= at]
            counted = len(until) if "fuzz_recompiles" in self.limits else _most_of_one(until)
            if counted > most:
                last = until[-1]
                why = "allowed" if "fuzz_recompiles" in self.limits else "explained by the sizes"
                yield Finding("recompiles", f"{counted} recompile(s) of {last['function']}, {most:g} {why}: "
                              f"{last['cause']}: {last['reason']}", at,
                              "\n".join(f"{r['during']}: {r['function']} {r['file']}:{r['line']}  {r['reason']}"
                                        for r in until), compiled)
                return

    def _allowed(self, trial: Trial) -> list[float]:
        if "fuzz_recompiles" in self.limits:
            return [self.limits["fuzz_recompiles"]] * len(trial.calls)
        dynamic = {None: "auto", False: "static", True: "dynamic"}[self.settings.get("dynamic")]
        modes = [call.trains(self.train) for call in trial.calls]
        counts = {which: iter(graphs(dynamic, (_sizes(call.batch) for call, mode in zip(trial.calls, modes, strict=True)
                                               if mode is which))) for which in (True, False)}
        made = dict.fromkeys(counts, 0)  # each mode has graphs of its own
        allowed: list[float] = []
        for mode in modes:
            made[mode] = next(counts[mode])
            allowed.append(sum(made.values()) - 1)
        return allowed


def _refused_last(trial: Trial) -> list[Call]:
    """The calls in an order in which no refused one comes before another."""
    refused = {passed.call.index for passed in trial.passed if passed.raised}
    return sorted(trial.calls, key=lambda call: call.index in refused)


def _mute(trial: Trial, passed: Passed) -> bool:
    """Whether a call's equality proves nothing."""
    return (passed.zero and not passed.gradients) or bool(why_vacuous(_of(trial, passed.call)))


def _of(trial: Trial, call: Call) -> list[tuple[str, Leaf]]:
    return [pair for pair in trial.leaves if pair[0] == call.label]


def _of_what_ran(trial: Trial) -> dict[str, Any]:
    """What the ledger saw, without calls that eager refuses: where the model raises, Dynamo breaks the graph."""
    refused = {passed.call.label for passed in trial.passed if passed.raised}
    return {name: [each for each in found if each.get("during") not in refused]
            if name in ("graph_breaks", "recompiles", "eager_frames") else found
            for name, found in trial.compiled.seen.items()}


def _most_of_one(recompiles: list[Mapping[str, Any]]) -> int:
    return max(Counter(map(compiled_unit, recompiles)).values(), default=0)


def _sizes(batch: Batch) -> tuple[int, ...]:
    """Every size of every input, and the whole numbers among them, which torch treats as sizes."""
    leaves = torch.utils._pytree.tree_leaves((batch.args, batch.kwargs))
    return tuple(size for leaf in leaves for size in (
        leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,) if type(leaf) is int else ()))
