"""The runner: one cell, in one rank. Build it, run it eagerly, run it compiled while instruments watch.

A cell is compiled once, whatever the number of checks: each check then writes its section of the
observation from what that one run recorded.
"""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from pytest_torchcompile import checks
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.checks.numerics import STEPS
from pytest_torchcompile.errors import RepeatedMistake, Unavailable, UsageError
from pytest_torchcompile.gauges import memory
from pytest_torchcompile.gauges.autotune import limit_autotuning
from pytest_torchcompile.gauges.compiler import kept_processes, set_compile_threads, warm_toolchain
from pytest_torchcompile.gauges.generated_code import read_generated_code
from pytest_torchcompile.ledger import Ledger, observe
from pytest_torchcompile.ledger.records import Text
from pytest_torchcompile.loading import import_all, one_line
from pytest_torchcompile.lowering.kernel_watch import KernelWatch
from pytest_torchcompile.observation import RAISED, RAISED_TWICE, Failure, Job, Observation
from pytest_torchcompile.oracle.calls import Call, Side, TrialOptions
from pytest_torchcompile.oracle.eager_errors import EagerRaised
from pytest_torchcompile.oracle.expected import References
from pytest_torchcompile.oracle.known_comparisons import KnownComparisons
from pytest_torchcompile.oracle.operator_rounding import unit_of
from pytest_torchcompile.oracle.own_draws import compile_with_own_draws
from pytest_torchcompile.oracle.spread import OneProcess, same_batches
from pytest_torchcompile.oracle.training import no_loss
from pytest_torchcompile.oracle.whole_step import WholeStep, compile_step
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.run import subject
from pytest_torchcompile.run.cause_search import search_cause
from pytest_torchcompile.run.cold_compile import compile_in_process
from pytest_torchcompile.run.environment import environment
from pytest_torchcompile.run.imported import imported_sources
from pytest_torchcompile.run.kept_log import begin_nothing, kept_log
from pytest_torchcompile.run.offspring import end_offspring, offspring_of
from pytest_torchcompile.state.torch_state import isolated, same_random_draws
from pytest_torchcompile.wrappers.process_group import forget_shardings, join_group, left_behind
from pytest_torchcompile.wrappers.protocol import CellTrial, Wrapper
from pytest_torchcompile.wrappers.protocol import load as load_wrapper
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["TUNING", "Run", "environment", "run_cell"]

TUNING = "autotuning, in these"
"""What of the other phases' seconds autotuning took."""

_APART = 104_729
"""Between the seeds of two replicas' batches: more than a cell has sizes."""
_OWN_MISTAKE = "pytest-torchcompile itself failed, not the model: "
# One for the process: cells of one model share its float64 run, whatever backend and mode they compile with.
_REFERENCES = References()


class Run(CellTrial):
    """One cell being run: what a check's ``measure`` may ask for. Everything is measured once."""

    def __init__(self, job: Job, cell: Cell, wrapper: Wrapper, mesh: Any = None) -> None:
        self.cell, self.job, self.wrapper, self._mesh = cell, job, wrapper, mesh
        self._fake = Wrapping.read(cell.wrapper).fake
        self.entry = ModelEntry.from_dict(job.entry)
        self.dims, self.matrix = self.entry.dims, self.entry.where.rsplit(":", 2)[0]
        root = self._home = Path(job.root)
        settings = subject.compile_settings(cell, root, self.entry.where)
        steps = 1
        if "training_steps" in job.checks:
            steps = int(job.limits.get("steps", STEPS))
        unit = _brought_in_unit(wrapper, settings)
        one_process = None
        if mesh is not None and not self._fake:
            one_process = self._build_one_process
        # Warm runs are to be fast, so the caches stay on.
        self.kernel_watch = KernelWatch(anew=False) if "kernels" in job.checks else None
        # Built several times, not copied: a forward that was patched onto a module stays bound to the original.
        # This first one is never run.
        self._first = subject.build_model(self.entry, cell, root, job.seed)
        calls = self._draw_calls()
        if self.is_whole_step:
            subject.refuse_other_step(cell, job.checks, self.entry.where)
        loss, train = subject.loss_function(self.entry, root), cell.phase == "training"
        if self.is_whole_step:
            self._first = WholeStep(self._first, loss)
            # The step itself has its loss and its backward pass.
            loss, train = no_loss, False
        options = TrialOptions(
            loss=loss, train=train, seed=job.seed, root=root,
            unit=unit,
            # The wrapper too: what narrower dtypes it brings in is seen by the tape of its own eager run. And a whole
            # step has values that a model has not: its loss by another name, gradients for results.
            references=_REFERENCES, key=(repr(self.entry), cell.dtype, cell.device, cell.phase, cell.user,
                                         cell.wrapper, job.seed, self.replica, self.is_whole_step),
            covered=True, steps=steps, keep_texts=True,
            one_process=one_process, instrument=self._watch_more,
            compared=not self._fake, varied=not self._fake, known=self._known_comparisons(),
            own_numbers=mesh is None,
        )
        super().__init__(self._side, self._first, settings, calls, options)
        self.wrapping = cell.wrapper

    def _watch_more(self, ledger: Ledger) -> AbstractContextManager[None]:
        """Watch what only some checks and limits ask for."""
        ledger.times_guards_often = "guard_us" in self.job.limits
        if self.kernel_watch is None:
            return nullcontext()
        return self.kernel_watch.taken(ledger)

    def _draw_calls(self) -> list[Call]:
        """The cell's calls. Each replica draws batches of its own, so that one that ignores the others is found out."""
        seeds = [self.job.seed + _APART * replica for replica in range(self.replicas)]
        drawn = [subject.make_batches(self.entry, self.cell, self._home, seed) for seed in seeds]
        batches = []
        for calls_of_replica in drawn:
            batches.append([batch for _, batch in calls_of_replica])
        first, *rest = batches
        if self.cell.phase == "training" and rest and all(same_batches(first, other) for other in rest):
            raise UsageError(f"{self.entry.where}: inputs {self.entry.inputs!r} gives all {self.replicas} replicas the "
                             "same batch, so nobody could tell whether gradients are averaged; have it draw from "
                             "torch's own generator, which is seeded for each replica")
        own = drawn[self.replica]
        del batches[self.replica]
        calls = []
        for index, (sizes, batch) in enumerate(own):
            others = tuple(other[index] for other in batches)
            calls.append(Call(index, batch, sizes, other_replicas=others))
        return calls

    @property
    def is_whole_step(self) -> bool:
        """Whether what is compiled is a step with its loss and its backward pass, and not the model."""
        return self.cell.backend == "toolkit" and self.cell.capture == "step"

    @property
    def replicas(self) -> int:
        """How many ranks or groups of ranks have a batch of their own."""
        if self._fake or not self._has_data_dimension:
            return 1
        return int(self._mesh["data"].size())

    @property
    def replica(self) -> int:
        """Which of them this rank belongs to."""
        if not self._has_data_dimension:
            return 0
        return int(self._mesh.get_local_rank("data"))

    @property
    def single(self) -> bool:
        """Whether no other rank waits for what this one does."""
        return self._mesh is None

    @property
    def _has_data_dimension(self) -> bool:
        return self._mesh is not None and "data" in self._mesh.mesh_dim_names

    def batch(self, sizes: Mapping[str, int], seed: int) -> Batch:
        """Another batch for the cell's model."""
        return subject.make_batch(self.entry, self.cell, self._home, seed, sizes)

    def _known_comparisons(self) -> KnownComparisons | None:
        """Those of an earlier run of a cell of one rank; None where nobody asks for them."""
        if self.job.comparisons is None or self._mesh is not None or self._fake:
            return None
        return KnownComparisons(self.job.comparisons)

    def compile_apart(self, hash_seed: int) -> dict[str, Any]:
        """The code that another process makes of the cell."""
        return compile_in_process(self.job, hash_seed)

    def compile_calls(self) -> tuple[list[Text], str]:
        """Compile the model for each call of the first pass; what each stage wrote, and what a call raised."""
        side = self.make(dict(self.settings))
        with observe(root=self.root, keep_texts=True) as ledger:
            for call in self.calls:
                recording, _ = side.run(call, self.loss, self.train, self.seed)
                if recording.error is not None:
                    return ledger.texts, f"{recording.error} at {call.label}"
        return ledger.texts, ""

    def _side(self, settings: dict[str, Any] | None) -> Side:
        model = self._build_another()
        # A wrapper of one process takes no mesh.
        if self.is_whole_step:
            step = WholeStep(model, subject.loss_function(self.entry, self._home))
            return Side(compile_step(step, settings), step)
        meshes = () if self._mesh is None else (self._mesh,)
        call = self.wrapper.wrap(model, settings, self.cell, *meshes)
        if not callable(call):
            raise UsageError(f"{self.entry.where}: wrapper {self.cell.wrapper!r} returned {call!r}; expected what is "
                             "called in place of the model")
        return Side(call, model, self.wrapper.spread)

    def _build_one_process(self) -> Side:
        model = self._build_another()
        return Side(model, model, OneProcess)

    def _build_another(self) -> torch.nn.Module:
        """The model once more, with the parameters and buffers of the first."""
        other = subject.build_model(self.entry, self.cell, self._home, self.seed)
        for kind, ours, theirs in (
            ("parameters", dict(self._first.named_parameters()), dict(other.named_parameters())),
            ("buffers", dict(self._first.named_buffers()), dict(other.named_buffers())),
        ):
            if _shapes_of(ours) != _shapes_of(theirs):
                raise UsageError(f"{self.entry.where}: factory {self.entry.factory!r} made another model when it was "
                                 f"called again: its {kind} differ in name or shape")
            with torch.no_grad():
                # Copied, though the seed is the same: a factory may draw from a generator that nobody seeds.
                for name, tensor in ours.items():
                    if not is_lazy(tensor):
                        theirs[name].copy_(tensor)
        return other


def _brought_in_unit(wrapper: Wrapper, settings: Mapping[str, Any]) -> float | None:
    """The unit roundoff of the narrowest dtype that the wrapper or a graph pass brings in; None: they bring none."""
    units = []
    if wrapper.unit:
        units.append(unit_of(getattr(torch, wrapper.unit)))
    brought = getattr(settings["backend"], "brings_in", None)
    if brought is not None:
        units.append(unit_of(brought))
    return max(units, default=None)


def _shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    # A lazy parameter has no shape before the first call; that it is lazy is part of what is compared.
    shapes: dict[str, Any] = dict.fromkeys(tensors)
    for name, tensor in tensors.items():
        if not is_lazy(tensor):
            shapes[name] = tensor.shape
    return shapes


def run_cell(job: Job, in_rank: bool = False) -> tuple[dict[str, Any], bool]:
    """Run a cell in this process. Returns the observation as plain data, and whether the process is spoilt.

    ``in_rank``: it is a rank process, so that what the cell started and left behind is to be ended with the cell.
    """
    cell = Cell.from_dict(job.cell)
    seen = Observation(cell.id, environment=environment())
    # Also where nothing changes: this gives a fork its own thread pool. Autograd's threads, which start at once, would
    # each make one, and the second ends the process ("Invalid thread pool!", seen in torch 2.13.0+cu130).
    torch.set_num_threads(job.threads or torch.get_num_threads())
    set_compile_threads(job.compile_threads)
    import_all(job.modules, Path(job.root))
    seen.sources = imported_sources(Path(job.root), job.modules)
    # What an import has started serves the cells after this one too.
    known = offspring_of(os.getpid())
    poisoned = False
    try:
        with isolated(seen.leaks), same_random_draws(), limit_autotuning(job.autotune_choices) as tuned:
            seen.failure = _observe_cell(job, cell, seen)
            if seen.failure is not None:
                seen.failed_at = time.monotonic()
        if tuned.seconds:
            seen.seconds[TUNING] = tuned.seconds
    except Exception:
        seen.failure = Failure("internal", "torch's state could not be put back after the cell",
                               "clean-up", traceback.format_exc())
        poisoned = True
    seen.sources |= imported_sources(Path(job.root), job.modules)
    left = left_behind()
    why = memory.sticky_error(wait=not left)
    if why:
        # Whatever else it looks like is what came of this: eager, the reference and every check after it fail too.
        seen.failure = Failure("crash", f"the GPU can't be used any more by the process that ran the cell: {why}",
                               "on the GPU", _said_before(seen))
        poisoned = True
    elif not left:
        memory.release_memory()
    if Wrapping.read(cell.wrapper).ranks > 1:
        poisoned = poisoned or seen.failure is not None or left or not forget_shardings()
    if in_rank:
        end_offspring(keep=known | kept_processes(offspring_of(os.getpid(), known)))
    return seen.to_dict(), poisoned


def _said_before(seen: Observation) -> str:
    """What the cell itself had said when the GPU failed."""
    error = seen.sections.get("compiles", {}).get("error")
    if error:
        return f"{RAISED} {error['type']} in {error['phase']}\n{error['traceback']}"
    if seen.failure:
        return f"{seen.failure.message}\n{seen.failure.evidence}".strip()
    return ""


def _observe_cell(job: Job, cell: Cell, seen: Observation) -> Failure | None:
    try:
        where = ModelEntry.from_dict(job.entry).where
        wrapper = load_wrapper(cell.wrapper, Path(job.root), where)
        with kept_log(job) as begin_part, \
                join_group(job, cell, wrapper, where, lambda: seen.failed_at is not None) as mesh:
            _observe_run(Run(job, cell, wrapper, mesh), seen, begin_part)
    except Unavailable as why:
        return Failure("skip", str(why))
    except RepeatedMistake as why:
        return Failure("usage", str(why), RAISED_TWICE)
    except UsageError as why:
        return Failure("usage", str(why))
    except EagerRaised as why:
        return _failure_of_eager(why, Path(job.root))
    except Exception as why:
        if memory.out_of_memory(why):
            return Failure("crash", f"the GPU has no memory left: {why}", "on the GPU", traceback.format_exc())
        return Failure("internal", f"{_OWN_MISTAKE}{type(why).__name__}: {why}", "", traceback.format_exc())
    return None


def _observe_run(run: Run, seen: Observation, begin_part: Callable[[str], None] = begin_nothing) -> None:
    cold = _why_cold(run) if run.job.warm_toolchain else ""
    run.run()
    if run.compiled.error:
        seen.failed_at = run.compiled.error.at
    seen.seconds = run.seconds
    seen.leaks += run.leaks
    _measure_sections(run, seen, begin_part)
    begin_part("the model with Inductor's own random numbers")
    beside = {"own_draws": compile_with_own_draws(run, run.single), "cold_compiler": cold}
    seen.sections["compiles"] |= {key: value for key, value in beside.items() if value}
    _note_generated_code(run, seen)
    if known := run.options.known:
        seen.comparisons = {"taken": known.taken, "made": known.made}
    begin_part("the search for a cause, with other backends and settings")
    search_cause(run, seen)


def _measure_sections(run: Run, seen: Observation, begin_part: Callable[[str], None]) -> None:
    """Have each check of the cell measure. In the order of CHECKS: the last drops what was compiled."""
    for name in checks.CHECKS:
        # That compiled code ran is asked of every verdict.
        if name == "compiles" or name in run.job.checks:
            begin_part(f"the check {name}, which runs the model again")
            seen.sections[name] = checks.load(name).measure(run)


def _note_generated_code(run: Run, seen: Observation) -> None:
    generated = read_generated_code(run.texts)
    seen.sections["compiles"]["code"] = [graph.to_dict() for graph in generated.graphs]
    # Two runs are compared by what rank 0 compiled; every rank would send as much through torchrun's store.
    if run.job.rank == 0:
        seen.code_texts = generated.texts


def _why_cold(run: Run) -> str:
    """Warm the compiler up; returns why that could not be, which the cell may well meet itself."""
    try:
        warm_toolchain(run.settings, run.cell.device)
    except Exception as error:
        return one_line(error)
    return ""


_TORCH = str(Path(torch.__file__).parent)


def _failure_of_eager(why: EagerRaised, root: Path) -> Failure:
    """One line with the innermost place in the user's code; what else of it was on the way there is the evidence."""
    frames = []
    for file, line, name in re.findall(r'File "(.+?)", line (\d+), in (\S+)', why.error.traceback):
        if file.startswith(_TORCH):
            continue
        # The user's own code is told from the root; a file elsewhere is found by its whole path only.
        shown = file
        if Path(file).is_relative_to(root):
            shown = os.path.relpath(file, root)
        frames.append(f"{shown}:{line} in {name}")
    text = str(why)
    if frames:
        text = f"{why} ({frames[-1]})"
    if why.given:
        text = f"{text}; {why.given}"
    if not frames:
        return Failure("user", text, why.error.phase, why.error.traceback)
    return Failure("user", text, why.error.phase, "\n".join(frames[:-1]))
