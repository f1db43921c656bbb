"""The command ``pytest-torchcompile explain``: one cell, or one model without a matrix.

A cell of several ranks is explained by as many processes, which torchrun starts. Each compiles its part, and rank 0
tells what became of its own. A cell of fake ranks is explained by one process, as rank 0 of so many.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.adoption.chosen_cell import chosen_cell
from pytest_torchcompile.cell import TOOLKIT, Cell
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.explain.explanation_text import explanation_lines
from pytest_torchcompile.explain.files import folder_of, write_files
from pytest_torchcompile.observation import Job, RankOutcome
from pytest_torchcompile.ranks.serving import set_environment
from pytest_torchcompile.ranks.torchrun import Torchrun
from pytest_torchcompile.report.safe_output import harmless_text
from pytest_torchcompile.wrappers.wrapping import Wrapping

if TYPE_CHECKING:
    from pytest_torchcompile.explain.explanation import Explanation
    from pytest_torchcompile.explain.roofline import Roofline
    from pytest_torchcompile.plan.expansion import PlannedCell
    from pytest_torchcompile.plan.matrix import Matrix
    from pytest_torchcompile.wrappers.protocol import Wrapper

__all__ = ["explain_cell", "run_command"]

SEED = 0
_GRACE_SECONDS: Final = 20.0
"""For the others to end a step that needs nothing of a rank which has raised."""


def run_command(given: argparse.Namespace) -> int:
    """Compile the model, print what became of it; returns 0, or 1 where the compiled step raised.

    Raises :class:`UsageError` for a model or a cell that is not there, and for one of several ranks where torchrun has
    not started as many processes.
    """
    matrix, planned = chosen_cell(given)
    job = _own_job(matrix, planned, os.environ, given)
    # Before torch is loaded.
    set_environment()
    from pytest_torchcompile.explain.roofline import Roofline
    from pytest_torchcompile.wrappers.process_group import left_behind

    folder = folder_of(planned.cell.id)
    if sys.stderr.isatty() and job.rank == 0:
        print(f"compiling {planned.cell.id}: a large model takes minutes", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch, "trace.log")
        explained = explain_cell(matrix, planned, trace, job)
        if job.rank > 0 and explained.error:
            # At once: rank 0 may wait in a collective for this rank, until torchrun ends it because this one has.
            print(harmless_text(f"rank {job.rank}: {explained.error}"), file=sys.stderr, flush=True)
        errors = _errors_of_ranks(job, explained.error)
        if job.rank > 0:
            return 1 if explained.error else 0
        # A device may wait for ever for the collective of a group that was left behind.
        roofline = None if left_behind() else Roofline.of(explained, planned.cell.device)
        write_files(explained, folder, trace, roofline)
    if given.json:
        told = {} if roofline is None else roofline.to_dict()
        print(json.dumps({**explained.to_dict(), "roofline": told}, indent=1))
    else:
        _print_text(explained, roofline, folder)
    for rank, error in errors.items():
        if rank > 0:
            print(harmless_text(f"explained is rank 0; rank {rank}: {error}"), file=sys.stderr)
    return 1 if errors else 0


def _print_text(explained: Explanation, roofline: Roofline | None, folder: Path) -> None:
    lines = [*explanation_lines(explained), ""]
    if roofline is not None:
        lines += roofline.lines()
    for line in lines:
        print(harmless_text(line))
    print(f"\nall stages side by side: {folder}/index.html; graphs, kernels, guards and the roofline "
          "are files beside it")


def _errors_of_ranks(job: Job, error: str) -> dict[int, str]:
    """Rank to what the compiled step raised there, of those where it did; a rank that says nothing is one of them."""
    if job.world == 1:
        return {0: error} if error else {}
    from pytest_torchcompile.wrappers.process_group import exchange_outcomes

    # As a rank of a cell tells it.
    mine = json.dumps(asdict(RankOutcome("done", {"failure": None, "sections": {"compiles": {"error": error}}})))
    # Where this rank has raised, others may be waiting for it: they have to be told of it, and not to be waited for.
    patience = _GRACE_SECONDS if error else job.timeout
    errors: dict[int, str] = {}
    for rank, heard in enumerate(exchange_outcomes(f"{job.rendezvous}/told", job.rank, job.world, mine, patience)):
        if heard is None:
            errors[rank] = f"it has not ended within {patience:.0f} s"
            continue
        raised = json.loads(heard)["value"]["sections"]["compiles"]["error"]
        if raised:
            errors[rank] = raised
    return errors


def _own_job(
    matrix: Matrix, planned: PlannedCell, environment: Mapping[str, str], given: argparse.Namespace | None = None
) -> Job:
    """What this process does of the cell: all of it, or the rank that torchrun has given it.

    Raises :class:`UsageError` for a cell of several processes where torchrun has not started as many. ``given``: the
    command, which is told again with torchrun before it.
    """
    cell = planned.cell
    job = Job(cell.to_dict(), matrix.models[cell.model].to_dict(), str(matrix.root), ())
    processes = Wrapping.read(cell.wrapper).processes
    if processes == 1:
        started = environment.get("WORLD_SIZE") or "1"
        # They would all write into one folder.
        if "TORCHELASTIC_RUN_ID" in environment and int(started) > 1:
            raise UsageError(f"{cell.id}: wrapper {cell.wrapper!r} runs in one process, and torchrun has started "
                             f"{started}; leave torchrun out")
        return job
    # A cell's id may have what a shell reads.
    words = ["explain", cell.id if given is None else given.model]
    if given is not None and given.matrix:
        words += ["--matrix", given.matrix]
    command = f"torchrun --nproc-per-node {processes} -m pytest_torchcompile {shlex.join(words)}"
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
    from pytest_torchcompile.explain.capture import LOST_OF_FAKE_RANKS, LOST_OF_RANKS, explain_step
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
    of_several_ranks = Wrapping.read(cell.wrapper).processes > 1
    lost: tuple[str, ...] = ()
    if of_several_ranks:
        lost = LOST_OF_RANKS
    elif mesh is not None:
        lost = LOST_OF_FAKE_RANKS
    if cell.backend != "toolkit":
        return explain_step(compile_model, module, batch, cell.id, shown, trace, lost)
    with tempfile.TemporaryDirectory() as dumps:
        toolkit = replace(settings["backend"], dump=Path(dumps))
        settings["backend"] = toolkit
        explained = explain_step(compile_model, module, batch, cell.id, shown, trace, lost)
        explained.passes = read_changes(Path(dumps))
    if of_several_ranks:
        # A rank whose step has failed would not join the others in the steps of each table.
        explained.lost.append("what tables of decompositions change, of several ranks: name a cell of fake ranks")
    elif not explained.error:
        with isolated([]), preserved(module):
            explained.tables = table_changes(
                toolkit, lambda other: compile_with({**settings, "backend": other}).step(batch.clone()))
    return explained
