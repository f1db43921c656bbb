"""The runner: one cell, in one rank. Build it, run it eagerly, run it compiled while instruments watch.

A cell is compiled once, whatever the number of checks: each check then writes its section of the
observation from what that one run recorded.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from pytest_torchcompile import checks, subject
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.environment import environment
from pytest_torchcompile.errors import TorchcompileError, Unavailable, UsageError
from pytest_torchcompile.instruments import coverage, observe
from pytest_torchcompile.instruments.state import isolated
from pytest_torchcompile.instruments.warmup import compile_threads
from pytest_torchcompile.models import ModelEntry
from pytest_torchcompile.observation import Failure, Job, Observation
from pytest_torchcompile.oracle import (
    Fault,
    Leaf,
    Recording,
    Reference,
    StateSnapshot,
    Tape,
    compare,
    record,
    reference,
)
from pytest_torchcompile.oracle.units import unit_of
from pytest_torchcompile.references import References
from pytest_torchcompile.wrappers.protocol import Wrapper
from pytest_torchcompile.wrappers.protocol import load as load_wrapper

__all__ = ["Run", "environment", "run_cell"]

_REFERENCES = References()
SUFFIXES = ("", ", second time", ", third time")
"""How texts name the passes over a cell's calls."""
PASSES = len(SUFFIXES)


@dataclass(frozen=True)
class Call:
    """One call of the model: its sizes, its batch, and how texts name it."""

    index: int
    sizes: dict[str, int]
    batch: Batch

    @property
    def label(self) -> str:
        """``call 2 (B=2, S=64)``."""
        sizes = ", ".join(f"{k}={v}" for k, v in self.sizes.items())
        return f"call {self.index + 1}" + (f" ({sizes})" if sizes else "")


@dataclass
class Compiled:
    """What the compiled run recorded."""

    passes: list[list[Recording]] = field(default_factory=list)
    """All calls, PASSES times over: the first pass compiles, the others are served by what it compiled. Ends with
    the recording of the call that raised, if one did."""
    seen: dict[str, Any] = field(default_factory=dict)
    coverage: list[dict[str, Any]] = field(default_factory=list)
    """Per call: the share of the model's operator calls that ran inside compiled graphs."""
    error: Fault | None = None
    """What ended the run."""

class Run:
    """One cell being run: what a check's ``measure`` may ask for. Everything is measured once."""

    def __init__(self, job: Job, cell: Cell) -> None:
        self.cell = cell
        self.entry = ModelEntry.from_dict(job.entry)
        self.seed = job.seed
        self.seconds: dict[str, float] = {}
        root = self.root = Path(job.root)
        self.train = cell.phase == "training"
        self.wrapper: Wrapper = load_wrapper(cell.wrapper, root, self.entry.where)
        with self.phase("build"):
            settings = subject.settings(cell, root, self.entry.where)
            self.model = subject.build(self.entry, cell, root, job.seed)
            self.loss = subject.loss(self.entry, root)
            self.calls = [Call(i, sizes, batch) for i, (sizes, batch)
                          in enumerate(subject.batches(self.entry, cell, root, job.seed))]
            # Three of them in the same state: one runs eagerly, one compiled, one is kept for references. Built, not
            # copied: a forward that was patched onto a module stays bound to the original in a copy.
            self._pristine, self._twin = (self._another(job, root) for _ in range(2))
            self._eager_call = self.wrapper.wrap(self.model, None, cell)
            self._compiled_call = self.wrapper.wrap(self._twin, settings, cell)
        self._tapes: list[Tape] = []
        self.eager = self._run_eager()
        self.compiled = self._run_compiled()
        with self.phase("compare"):
            self.leaves = list(self._compare())

    def _another(self, job: Job, root: Path) -> torch.nn.Module:
        """The model once more, with the parameters and buffers of the first."""
        other = subject.build(self.entry, self.cell, root, job.seed)
        for kind in ("parameters", "buffers"):
            ours, theirs = (dict(getattr(m, f"named_{kind}")()) for m in (self.model, other))
            if _shapes(ours) != _shapes(theirs):
                raise UsageError(f"{self.entry.where}: factory {self.entry.factory!r} made another model when it was "
                                 f"called again: its {kind} differ in name or shape")
            with torch.no_grad():
                for name, tensor in ours.items():
                    if not is_lazy(tensor):
                        theirs[name].copy_(tensor)
        return other

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall seconds of a block to the phase ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _record(self, call: Callable[..., Any], model: torch.nn.Module, which: Call, mode: Any) -> Recording:
        return record(call, model, which.batch, loss=self.loss, train=self.train,
                      seed=self.seed + which.index, mode=mode)

    def _run_eager(self) -> list[list[Recording]]:
        """All calls as often as compiled, so that what the model counts or caches in Python has the same history."""
        start = StateSnapshot(self.model)
        passes: list[list[Recording]] = []
        with self.phase("eager"):
            for number in range(PASSES):
                passes.append([])
                for call in self.calls:
                    start.restore()
                    mode = None if number else self._tape()
                    passes[-1].append(self._record(self._eager_call, self.model, call, mode))
                    if error := passes[-1][-1].error:
                        raise UserError(call.label, error)
            start.restore()
        return passes

    def _tape(self) -> Tape:
        self._tapes.append(Tape())
        return self._tapes[-1]

    def _run_compiled(self) -> Compiled:
        compiled = Compiled()
        start = StateSnapshot(self._twin)
        with observe(root=self.root) as seen:
            for number, suffix in enumerate(SUFFIXES):
                compiled.passes.append([])
                with self.phase("steady" if number else "compiled"):
                    for call in self.calls if compiled.error is None else ():
                        start.restore()
                        with seen.during(call.label + suffix):
                            compiled.passes[-1].append(self._record(self._compiled_call, self._twin, call, None))
                        compiled.error = compiled.passes[-1][-1].error
                        if compiled.error:
                            break
            with self.phase("coverage"):
                for call in self.calls if compiled.error is None else ():
                    start.restore()
                    with seen.during(f"{call.label}, once more"):
                        compiled.error = self._cover(call, compiled.coverage)
                    if compiled.error:
                        break
        compiled.seen = _relative(seen.to_dict(), self.root)
        return compiled

    def _cover(self, call: Call, into: list[dict[str, Any]]) -> Fault | None:
        def forward(module: Callable[..., Any]) -> Callable[[], object]:
            batch = call.batch.clone()
            return lambda: module(*batch.args, **batch.kwargs)

        torch.manual_seed(self.seed + call.index)
        try:
            with torch.set_grad_enabled(self.train):
                found = coverage.measure(forward(self._eager_call), forward(self._compiled_call))
        except TorchcompileError:
            raise
        except Exception as error:
            return Fault(type(error).__name__, str(error), "forward, in a later call", traceback.format_exc())
        into.append({"call": call.label, **found.to_dict()})
        return None

    def _compare(self) -> Iterator[tuple[str, Leaf]]:
        for suffix, eagers, compileds in zip(SUFFIXES, self.eager, self.compiled.passes, strict=True):
            for call, eager, compiled in zip(self.calls, eagers, compileds, strict=False):
                if compiled.error:
                    return
                for leaf in compare(eager, compiled, lambda call=call: self._reference(call)):  # type: ignore[misc]
                    yield call.label + suffix, leaf

    def _reference(self, call: Call) -> Reference:
        # The wrapper too: what narrower dtypes it brings in is seen by the tape of its own eager run.
        key = (repr(self.entry), self.cell.dtype, self.cell.device, self.cell.phase, self.cell.user,
               self.cell.wrapper, self.seed, call.label)
        with self.phase("reference"):
            return _REFERENCES.get(key, lambda: reference(
                self._pristine, call.batch, loss=self.loss, train=self.train, seed=self.seed + call.index,
                tape=self._tapes[call.index],
                unit=unit_of(getattr(torch, self.wrapper.unit)) if self.wrapper.unit else None,
            ))


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: None if is_lazy(tensor) else tensor.shape for name, tensor in tensors.items()}


def _relative(seen: dict[str, Any], root: Path) -> dict[str, Any]:
    """Name the project's files from its root, so that reports of two checkouts agree."""
    home = f"{root}{os.sep}"
    for records in seen.values():
        for found in records:
            if isinstance(found, dict) and str(found.get("file", "")).startswith(home):
                found["file"] = found["file"][len(home):]
    return seen


class UserError(Exception):
    """The model raises without torch.compile too."""

    def __init__(self, label: str, error: Any) -> None:
        super().__init__(f"the model raises without torch.compile too, at {label}: {error.type}: {error.text}")
        self.error = error


def run_cell(job: Job) -> tuple[dict[str, Any], bool]:
    """Run a cell in this process. Returns the observation as plain data, and whether the process is spoilt."""
    cell = Cell.from_dict(job.cell)
    seen = Observation(cell.id, environment=environment())
    if job.threads:
        torch.set_num_threads(job.threads)
    compile_threads(job.compile_threads)
    subject.import_all(job.modules, Path(job.root))
    poisoned = False
    try:
        with isolated(seen.leaks), _same_random_draws():
            seen.failure = _observe_cell(job, cell, seen)
    except Exception:
        seen.failure = Failure("internal", "torch's state could not be put back after the cell",
                               "clean-up", traceback.format_exc())
        poisoned = True
    return seen.to_dict(), poisoned


def _observe_cell(job: Job, cell: Cell, seen: Observation) -> Failure | None:
    try:
        run = Run(job, cell)
        seen.seconds = run.seconds
        for name in dict.fromkeys(("compiles", *job.checks)):  # that compiled code ran is asked of every verdict
            seen.sections[name] = checks.load(name).measure(run)
    except Unavailable as why:
        return Failure("skip", str(why))
    except UsageError as why:
        return Failure("usage", str(why))
    except UserError as why:
        return Failure("user", str(why), why.error.phase, why.error.traceback)
    except Exception as why:
        return Failure("internal", f"{type(why).__name__}: {why}", "", traceback.format_exc())
    return None


@contextmanager
def _same_random_draws() -> Iterator[None]:
    """Have Inductor draw the random numbers that eager draws, so that dropout can be compared."""
    from torch._inductor import config

    with config.patch(fallback_random=True):
        yield
