"""Capture: a model is compiled and run once, while the ledger and hooks on Inductor note what is made of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import InstrumentError, UsageError
from pytest_torchcompile.explain.decompositions import DecompositionNotes, traced_operators
from pytest_torchcompile.explain.dynamo_hooks import BytecodeNotes
from pytest_torchcompile.explain.explanation import Explanation
from pytest_torchcompile.explain.graph_runs import GraphRuns
from pytest_torchcompile.explain.graph_texts import read_stages
from pytest_torchcompile.layer.compiled_modules import compiled_part, join_modules
from pytest_torchcompile.layer.config import CompileConfig
from pytest_torchcompile.layer.preservation import preserved
from pytest_torchcompile.layer.sample_batch import batch_for
from pytest_torchcompile.layer.step_runner import StepRunner
from pytest_torchcompile.layer.training_step import loss_of_step
from pytest_torchcompile.ledger import observe
from pytest_torchcompile.ledger.torch_logs import traced_to_file
from pytest_torchcompile.loading import one_line
from pytest_torchcompile.lowering.kernel_timing import KernelTimer
from pytest_torchcompile.lowering.kernel_watch import KernelWatch
from pytest_torchcompile.state.torch_state import isolated

__all__ = ["LOST_OF_FAKE_RANKS", "LOST_OF_RANKS", "explain", "explain_step"]

_NO_PROGRAMS: Final = "graphs as programs of their own: their collectives need the other ranks"
LOST_OF_RANKS: Final = (
    "seconds of single kernels of several ranks: every rank would have to run the same number of steps", _NO_PROGRAMS)
LOST_OF_FAKE_RANKS: Final = ("seconds of single kernels of fake ranks: their collectives do nothing", _NO_PROGRAMS)


def explain(
    model: Callable[..., Any],
    batch: Any,
    config: CompileConfig | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    train: bool | None = None,
    name: str = "",
) -> Explanation:
    """Compile a model, run one step, and tell what the compiler made of it.

    Caches are not asked, so everything is compiled anew, and what this process has compiled before is dropped. The
    state of the model is put back at the end.

    Args:
        model: Eager; a module or a function.
        batch: What it is called with: a tensor, a tuple, a dict, or ``(args, kwargs)``.
        config: How to compile; None: as ``torch.compile`` does by default. ``enabled`` is not asked.
        loss_fn: As for :class:`CompileSmoketest`.
        train: Whether there is a backward pass; None: as for :func:`pytest_torchcompile.benchmark`.
        name: What it is called in texts; by default its class.

    Raises:
        ValueError: For a model that is compiled already, or a part of which is.
        InstrumentError: This torch lacks an internal that is read; the text names it.
    """
    part = compiled_part(model)
    if part:
        raise ValueError(f"it runs compiled already ({part}); give explain the eager model (a compiled module keeps it "
                         "as _orig_mod)")
    config = config or CompileConfig()
    module = join_modules(model, loss_fn)
    loss = loss_of_step(module, loss_fn, train)
    settings = config.settings()

    def compile_model() -> StepRunner:
        return StepRunner(torch.compile(model, **settings), module, loss)

    shown = ", ".join(f"{key}={value}" for key, value in settings.items())
    return explain_step(compile_model, module, batch_for(model, batch), name or _name_of(model), shown)


def _name_of(model: Any) -> str:
    return getattr(model, "__name__", type(model).__name__)


def explain_step(
    compile_model: Callable[[], StepRunner], module: torch.nn.Module, batch: Batch, name: str, settings: str,
    trace: Path | None = None, lost_of_ranks: tuple[str, ...] = (),
) -> Explanation:
    """Run one step of what ``compile_model()`` returns, and tell what was compiled for it.

    :param trace: the file that torch's structured trace is written to, for tlparse.
    :param lost_of_ranks: where this process is one of several ranks, what is not told for that reason:
        :data:`LOST_OF_RANKS` or :data:`LOST_OF_FAKE_RANKS`. It runs this one step alone, and keeps no graph to be run.

    Raises :class:`UsageError` if the wrapper or the backend cannot be used with the model.
    """
    explained = Explanation(name, torch.__version__, settings)
    leaks: list[str] = []
    with isolated(leaks), preserved(module), observe(keep_texts=True) as seen:
        kernels, taken_apart = KernelWatch(explained.lost), DecompositionNotes()
        rewritten, runs, timer = BytecodeNotes(), GraphRuns(), KernelTimer()
        begun = time.perf_counter()
        with kernels.taken(seen), contextlib.ExitStack() as hooks:
            instruments = [taken_apart.taken(), rewritten.taken(), runs.taken(), timer.taken()]
            if trace is not None:
                instruments.append(traced_to_file(trace))
            for instrument in instruments:
                # What this torch lacks is said, and all else explained.
                try:
                    hooks.enter_context(instrument)
                except InstrumentError as missing:
                    if str(missing) not in explained.lost:
                        explained.lost.append(str(missing))
            runner: StepRunner | None = None
            try:
                runner = compile_model()
                runner.step(batch.clone())
            except UsageError:
                # A mistake in the project, as a wrapper that lacks what it needs, says nothing about the compiler.
                raise
            except Exception as error:
                explained.error = one_line(error)
        explained.stages = read_stages(seen.texts)
        explained.kernels = kernels.calls(seen.texts)
        explained.operators = traced_operators(taken_apart, explained.traced_graphs)
        explained.graph_runs = runs.runs
        explained.bytecode, explained.guards = rewritten.bytecode(), rewritten.guards()
        explained.compiles, explained.failures = list(seen.compiles), list(seen.failures)
        explained.graph_breaks, explained.eager_frames = list(seen.graph_breaks), list(seen.eager_frames)
        explained.lost += seen.lost
        explained.seconds = time.perf_counter() - begun
        if lost_of_ranks:
            explained.graph_runs = []
            explained.lost += lost_of_ranks
        elif runner is not None and not explained.error:
            on_gpu = batch.is_on_cuda or any(parameter.is_cuda for parameter in module.parameters())
            _time_kernels(explained, timer, None if on_gpu else lambda: runner.step(batch.clone()))
    return explained


def _time_kernels(explained: Explanation, timer: KernelTimer, step: Callable[[], object] | None) -> None:
    """Run some warm steps, and note how long each kernel takes in them; what fails there costs the seconds alone."""
    if step is None:
        explained.lost.append("seconds of single kernels on a GPU: a call returns before its kernel is done")
        return
    codes = [stage.text for stage in explained.stages if stage.stage == "code"]
    try:
        explained.kernels = timer.timed(explained.kernels, codes, step)
        explained.unrest, explained.others_load = timer.unrest, timer.others.told
    except Exception as error:
        explained.lost.append(f"seconds of single kernels: {one_line(error)}")
