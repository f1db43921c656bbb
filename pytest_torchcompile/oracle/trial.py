"""Trial: one program run eagerly and compiled, call by call, and everything compared. A cell of a matrix is one,
and so is :func:`~pytest_torchcompile.compare`.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.instruments import Ledger, coverage, observe
from pytest_torchcompile.oracle.comparison import compare
from pytest_torchcompile.oracle.expected import Reference
from pytest_torchcompile.oracle.leaf import Leaf
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.oracle.recording import Fault, Recording
from pytest_torchcompile.oracle.reference_runs import reference
from pytest_torchcompile.oracle.state import StateSnapshot
from pytest_torchcompile.oracle.tape import Tape

__all__ = ["PASSES", "Call", "Compiled", "EagerRaised", "Make", "Side", "Trial", "same_random_draws"]

SUFFIXES = ("", ", second time", ", third time")
"""How texts name the passes over a trial's calls."""
PASSES = len(SUFFIXES)


@dataclass(frozen=True)
class Call:
    """One call of the model: its batch, its sizes if they have names, and how texts name it."""

    index: int
    batch: Batch
    sizes: Mapping[str, int] = field(default_factory=dict)
    training: bool | None = None
    """Switches the model to training mode, with a backward pass, or to evaluation, without; None: as the trial says."""

    @property
    def label(self) -> str:
        """``call 2 (B=2, S=64)``."""
        sizes = ", ".join(f"{k}={v}" for k, v in self.sizes.items())
        mode = "" if self.training is None else ", training" if self.training else ", evaluation"
        return f"call {self.index + 1}" + (f" ({sizes})" if sizes else "") + mode


@dataclass(frozen=True)
class Side:
    """What is called, eagerly or compiled, and the module whose state it works on."""

    call: Callable[..., Any]
    module: torch.nn.Module


Make = Callable[["dict[str, Any] | None"], Side]
"""``make(settings)``: the model in its initial state, compiled with ``torch.compile(**settings)``; None: eager."""


@dataclass
class Compiled:
    """What the compiled run recorded."""

    passes: list[list[Recording]] = field(default_factory=list)
    """All calls, as often as there are passes: the first pass compiles, the others are served by what it compiled.
    Ends with the recording of the call that raised, if one did where eager had not."""
    seen: dict[str, Any] = field(default_factory=dict)
    runs: list[list[int]] = field(default_factory=list)
    """Pass by pass, how many compiled graphs ran in each call, its backward included."""
    coverage: list[dict[str, Any]] = field(default_factory=list)
    """Per call, where it was asked for: the share of the model's operator calls that ran inside compiled graphs."""
    error: Fault | None = None
    """What ended the run."""


class EagerRaised(Exception):
    """The model raises without torch.compile too."""

    def __init__(self, label: str, error: Fault) -> None:
        super().__init__(f"the model raises without torch.compile too, at {label}: {error.type}: {error.text}")
        self.error = error


class Trial:
    """One program, its calls, and what came of them. :meth:`run` once, then read."""

    def __init__(
        self,
        make: Make,
        pristine: Callable[[], torch.nn.Module],
        settings: dict[str, Any],
        calls: list[Call],
        *,
        loss: Callable[..., Any] | None = None,
        train: bool = True,
        seed: int = 0,
        unit: float | None = None,
        root: Path | None = None,
        covered: bool = False,
        may_raise: bool = False,
        passes: int = PASSES,
    ) -> None:
        """``pristine()`` gives the model in its initial state, for references. ``unit`` as for ``reference``.
        ``covered`` asks for the coverage of each call, which costs two more forward passes under torch's profiler.
        ``may_raise``: a call that raises eagerly has to raise compiled too; else it ends the trial.
        ``passes``: how often all calls are made, up to PASSES.
        """
        self.make, self.pristine, self.settings, self.calls = make, pristine, settings, calls
        self.loss, self.train, self.seed, self.unit = loss, train, seed, unit
        self._suffixes = SUFFIXES[:passes]
        self.root, self.covered, self.may_raise = root, covered, may_raise
        self.seconds: dict[str, float] = {}
        self.eager: list[list[Recording]] = []
        """All calls as often as compiled, so that what the model counts or caches in Python has the same history."""
        self.compiled = Compiled()
        self.leaves: list[tuple[str, Leaf]] = []
        """What was compared, each with the label of its call."""
        self._tapes: list[Tape] = []

    def run(self) -> None:
        """Run eagerly, then compiled while instruments watch, and compare. Raises EagerRaised; see ``may_raise``."""
        with self.phase("build"):
            # None serves the other: a model may count its calls or keep tensors in Python.
            eager, compiled = self.make(None), self.make(dict(self.settings))
        with self.phase("eager"), torch.compiler.set_stance("force_eager"):
            self._run_eager(eager)
        self._run_compiled(eager, compiled)
        with self.phase("compare"):
            self.leaves = list(self._compare())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall seconds of a block to the phase ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def reference(self, call: Call) -> Reference:
        """The float64 runs of a call; asked for when something isn't bitwise equal."""
        return reference(
            self._switch(self.pristine(), call), call.batch, loss=self.loss, train=self._trains(call),
            seed=self.seed + call.index, tape=self._tapes[call.index], unit=self.unit,
        )

    def _record(self, side: Side, call: Call, mode: Any = None) -> Recording:
        self._switch(side.module, call)
        return record(side.call, side.module, call.batch, loss=self.loss, train=self._trains(call),
                      seed=self.seed + call.index, mode=mode)

    def _trains(self, call: Call) -> bool:
        return self.train if call.training is None else call.training

    def _switch(self, module: torch.nn.Module, call: Call) -> torch.nn.Module:
        if any(each.training is not None for each in self.calls):
            module.train(self._trains(call))
        return module

    def _run_eager(self, side: Side) -> None:
        start = StateSnapshot(side.module)
        for number in range(len(self._suffixes)):
            self.eager.append([])
            for call in self.calls:
                start.restore()
                self.eager[-1].append(self._record(side, call, None if number else self._tape()))
                error = self.eager[-1][-1].error
                if error and not self.may_raise:
                    raise EagerRaised(call.label, error)
        start.restore()

    def _tape(self) -> Tape:
        self._tapes.append(Tape())
        return self._tapes[-1]

    def _run_compiled(self, eager: Side, side: Side) -> None:
        compiled, start = self.compiled, StateSnapshot(side.module)
        with observe(root=self.root) as seen:
            for number, suffix in enumerate(self._suffixes):
                compiled.passes.append([])
                compiled.runs.append([])
                with self.phase("steady" if number else "compiled"):
                    for call in self.calls if compiled.error is None else ():
                        start.restore()
                        before = sum(graph.runs for graph in seen.graphs)
                        with seen.during(call.label + suffix):
                            found = self._record(side, call)
                        compiled.passes[-1].append(found)
                        compiled.runs[-1].append(sum(graph.runs for graph in seen.graphs) - before)
                        if found.error and not self.eager[number][call.index].error:
                            compiled.error = found.error
                            break
            if self.covered and compiled.error is None:
                with self.phase("coverage"):
                    compiled.error = self._cover_all(eager, side, start, seen)
        compiled.seen = _relative(seen.to_dict(), self.root)

    def _cover_all(self, eager: Side, side: Side, start: StateSnapshot, seen: Ledger) -> Fault | None:
        for call in self.calls:
            start.restore()
            with seen.during(f"{call.label}, once more"):
                if error := self._cover(eager, side, call):
                    return error
        return None

    def _cover(self, eager: Side, compiled: Side, call: Call) -> Fault | None:
        def forward(side: Side) -> Callable[[], object]:
            batch = call.batch.clone()
            return lambda: side.call(*batch.args, **batch.kwargs)

        torch.manual_seed(self.seed + call.index)
        try:
            with torch.set_grad_enabled(self._trains(call)):
                found = coverage.measure(forward(eager), forward(compiled))
        except TorchcompileError:
            raise
        except Exception as error:
            return Fault(type(error).__name__, str(error), "forward, in a later call", traceback.format_exc())
        self.compiled.coverage.append({"call": call.label, **found.to_dict()})
        return None

    def _compare(self) -> Iterator[tuple[str, Leaf]]:
        for suffix, eagers, compileds in zip(self._suffixes, self.eager, self.compiled.passes, strict=True):
            for call, eager, compiled in zip(self.calls, eagers, compileds, strict=False):
                if compiled.error and not eager.error:
                    return
                for leaf in compare(eager, compiled, lambda call=call: self._timed(call)):  # type: ignore[misc]
                    yield call.label + suffix, leaf

    def _timed(self, call: Call) -> Reference:
        with self.phase("reference"):
            return self.reference(call)


def _relative(seen: dict[str, Any], root: Path | None) -> dict[str, Any]:
    """Name the project's files from its root, so that reports of two checkouts agree."""
    home = f"{root or Path.cwd()}{os.sep}"
    for records in seen.values():
        for found in records:
            if isinstance(found, dict) and str(found.get("file", "")).startswith(home):
                found["file"] = found["file"].removeprefix(home)
    return seen


@contextmanager
def same_random_draws() -> Iterator[None]:
    """Have Inductor draw the random numbers that eager draws, so that dropout can be compared."""
    from torch._inductor import config

    with config.patch(fallback_random=True):
        yield
