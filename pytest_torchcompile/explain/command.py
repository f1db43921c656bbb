"""The command ``pytest-torchcompile explain``: one cell, or one model without a matrix.

A cell of several ranks is explained by as many processes, which torchrun starts. Each compiles its part, and rank 0
tells what became of its own. A cell of fake ranks is explained by one process, as rank 0 of so many.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.adoption.chosen_cell import chosen_cell
from pytest_torchcompile.cell import TOOLKIT, Cell
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.explain.explanation_text import explanation_lines
from pytest_torchcompile.explain.files import folder_of, write_files
from pytest_torchcompile.observation import Job
from pytest_torchcompile.ranks.serving import set_environment
from pytest_torchcompile.ranks.torchrun import Torchrun
from pytest_torchcompile.report.safe_output import harmless_text
from pytest_torchcompile.wrappers.wrapping import Wrapping

if TYPE_CHECKING:
    from pytest_torchcompile.explain.explanation import Explanation
    from pytest_torchcompile.plan.expansion import PlannedCell
    from pytest_torchcompile.plan.matrix import Matrix
    from pytest_torchcompile.wrappers.protocol import Wrapper

__all__ = ["explain_cell", "run_command"]

SEED = 0


def run_command(given: argparse.Namespace) -> int:
    """Compile the model, print what became of it; returns 0, or 1 where the compiled step raised.

    Raises :class:`UsageError` for a model or a cell that is not there, and for one of several ranks.
    """
    matrix, planned = chosen_cell(given)
    job = _own_job(matrix, planned, os.environ)
    # Before torch is loaded.
    set_environment()
    from pytest_torchcompile.explain.roofline import Roofline

    folder = folder_of(planned.cell.id)
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch, "trace.log")
        explained = explain_cell(matrix, planned, trace, job)
        if job.rank > 0:
            return 1 if explained.error else 0
        roofline = Roofline.of(explained, planned.cell.device)
        write_files(explained, folder, trace, roofline)
    if given.json:
        print(json.dumps({**explained.to_dict(), "roofline": roofline.to_dict()}, indent=1))
    else:
        for line in explanation_lines(explained):
            print(harmless_text(line))
        print()
        for line in roofline.lines():
            print(harmless_text(line))
        print(f"\nall stages side by side: {folder}/index.html; graphs, kernels, guards and the roofline "
              "are files beside it")
    return 1 if explained.error else 0


def _own_job(matrix: Matrix, planned: PlannedCell, environment: Mapping[str, str]) -> Job:
    """What this process does of the cell: all of it, or the rank that torchrun has given it.

    Raises :class:`UsageError` for a cell of several processes where torchrun has not started as many.
    """
    cell = planned.cell
    job = Job(cell.to_dict(), matrix.models[cell.model].to_dict(), str(matrix.root), ())
    processes = Wrapping.read(cell.wrapper).processes
    if processes == 1:
        return job
    # A cell's id may have brackets and stars.
    command = f"torchrun --nproc-per-node {processes} -m pytest_torchcompile explain {shlex.quote(cell.id)}"
    try:
        own = Torchrun.read(environment)
    except UsageError:
        raise UsageError(f"{cell.id}: wrapper {cell.wrapper!r} needs {processes} processes, and this is one; run "
                         f"{command}, or name a cell of this model with fake ranks or wrapper none") from None
    if own.world != processes:
        raise UsageError(f"{cell.id}: wrapper {cell.wrapper!r} needs {processes} processes, and torchrun has started "
                         f"{own.world}; run {command}")
    return replace(job, rank=own.rank, world=own.world, rendezvous=own.meeting, local_rank=own.local_rank)


def explain_cell(
    matrix: Matrix, planned: PlannedCell, trace: Path | None = None, job: Job | None = None
) -> Explanation:
    """Compile the model of a cell as the cell would, run a step of its first size, and tell what became of it.

    :param trace: as for :func:`~pytest_torchcompile.explain.capture.explain_step`.
    :param job: which of the cell's ranks this process is; None: the only one.
    """
    from pytest_torchcompile.wrappers.process_group import join_group
    from pytest_torchcompile.wrappers.protocol import load as load_wrapper

    job = job or _own_job(matrix, planned, {})
    cell, root = planned.cell, Path(matrix.root)
    where = matrix.models[cell.model].where
    wrapper = load_wrapper(cell.wrapper, root, where)
    explained: Explanation | None = None
    with join_group(job, cell, wrapper, where, lambda: explained is None or bool(explained.error)) as mesh:
        explained = _explain_rank(matrix, cell, wrapper, mesh, trace)
    return explained


def _explain_rank(matrix: Matrix, cell: Cell, wrapper: Wrapper, mesh: Any, trace: Path | None) -> Explanation:
    """The same for this process, which is alone where ``mesh`` is None."""
    from pytest_torchcompile.explain.capture import explain_step
    from pytest_torchcompile.explain.toolkit_notes import read_changes, table_changes
    from pytest_torchcompile.layer.preservation import preserved
    from pytest_torchcompile.layer.step_runner import StepRunner
    from pytest_torchcompile.layer.training_step import loss_of_step
    from pytest_torchcompile.oracle.whole_step import WholeStep, compile_step
    from pytest_torchcompile.run import subject
    from pytest_torchcompile.state.torch_state import isolated

    root, entry = Path(matrix.root), matrix.models[cell.model]
    settings = subject.compile_settings(cell, root, entry.where)
    module = subject.build_model(entry, cell, root, SEED)
    _sizes, batch = subject.make_batches(entry, cell, root, SEED)[0]
    loss = loss_of_step(module, subject.loss_function(entry, root), train=cell.phase == "training")

    if cell.backend == "toolkit" and cell.capture == "step":
        # It has its loss, and its backward pass, itself.
        module, loss = WholeStep(module, subject.loss_function(entry, root)), None

    def compile_with(chosen: dict[str, Any]) -> StepRunner:
        if isinstance(module, WholeStep):
            return StepRunner(compile_step(module, chosen), module, None)
        if mesh is None:
            return StepRunner(wrapper.wrap(module, chosen, cell), module, loss)
        # Its parameters are spread over the ranks in place.
        spread = subject.build_model(entry, cell, root, SEED)
        return StepRunner(wrapper.wrap(spread, chosen, cell, mesh), spread, loss)

    def compile_model() -> StepRunner:
        return compile_with(settings)

    idle = set() if cell.backend == "toolkit" else set(TOOLKIT)
    shown = ", ".join(f"{axis}={value}" for axis, value in cell.axes.items() if axis not in {"model", *idle})
    of_ranks = mesh is not None
    if cell.backend != "toolkit":
        return explain_step(compile_model, module, batch, cell.id, shown, trace, of_ranks=of_ranks)
    with tempfile.TemporaryDirectory() as dumps:
        toolkit = replace(settings["backend"], dump=Path(dumps))
        settings["backend"] = toolkit
        explained = explain_step(compile_model, module, batch, cell.id, shown, trace, of_ranks=of_ranks)
        explained.passes = read_changes(Path(dumps))
    if not explained.error:
        with isolated([]), preserved(module):
            explained.tables = table_changes(
                toolkit, lambda other: compile_with({**settings, "backend": other}).step(batch.clone()))
    return explained
