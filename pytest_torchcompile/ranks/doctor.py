"""doctor: what of a matrix this machine can run, and why not the rest. One training cell is run to prove it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.errors import Unavailable, UsageError
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.quantity import count
from pytest_torchcompile.ranks.execution import Execution, gpus_of
from pytest_torchcompile.ranks.gpus import gpu_device_files, visible_gpus
from pytest_torchcompile.ranks.serving import set_environment
from pytest_torchcompile.ranks.starting import open_processes
from pytest_torchcompile.run.settings import Settings
from pytest_torchcompile.wrappers.wrapping import Wrapping

if TYPE_CHECKING:
    from pytest_torchcompile.plan.matrix import Matrix, PlannedCell

__all__ = ["Survey", "TriedCell", "examine_machine", "machine_lines", "survey_cells", "try_training"]


@dataclass(frozen=True)
class Survey:
    """Which cells of a matrix can run here, and how many cannot, by reason."""

    runnable: tuple[PlannedCell, ...]
    why_not: Counter[str]


@dataclass(frozen=True)
class TriedCell:
    """One training cell that was run."""

    cell: str
    seconds: float
    problems: tuple[str, ...] = ()
    """Why it could not be judged: what it says, and what to do. Empty: it ran."""


def examine_machine(path: Path, *, as_json: bool = False) -> int:
    """Print what this machine can run of a matrix; returns the exit code, 1 if nothing, or if the cell tried has none.

    Raises :class:`UsageError` for a mistake in the matrix.
    """
    matrix = load_matrix(path)
    set_environment()
    from pytest_torchcompile.run.environment import environment

    about = environment()
    if not as_json:
        # At once: what follows makes every model.
        for line in machine_lines(about):
            print(line)
    survey = survey_cells(matrix)
    tried = try_training(matrix, survey.runnable)
    problems = () if tried is None else tried.problems
    code = 0 if survey.runnable and not problems else 1
    if as_json:
        print(json.dumps({
            "exit_code": code, "environment": about, "matrix": str(path), "cells": len(matrix.cells),
            "runnable": [planned.cell.id for planned in survey.runnable], "cannot": survey.why_not,
            "tried": None if tried is None else asdict(tried),
        }, indent=1))
        return code
    if tried is not None and problems:
        print(f"{path}: a training cell was tried and could not be judged here: {tried.cell}")
        for problem in problems:
            print(f"  {problem}")
    else:
        if tried is not None:
            print(f"one training cell was tried and ran ({tried.seconds:.1f} s): {tried.cell}")
        print(f"{path}: {len(survey.runnable)} of {count(len(matrix.cells), 'cell')} can run here")
    for why, number in survey.why_not.most_common():
        print(f"  {number} cannot: {why}")
    return code


def machine_lines(about: dict[str, Any]) -> Iterator[str]:
    """Lines about the machine, from :func:`~pytest_torchcompile.run.environment.environment`."""
    yield (f"torch {about['torch']}, triton {about['triton'] or 'none'}, Python {about['python']}, "
           f"{about['cores']} cores ({about['cpu']})")
    if about["compiler"]:
        yield f"C++ compiler: {about['compiler']}"
    else:
        yield "no C++ compiler, which Inductor needs on a CPU: install g++ or clang"
    gpus = [device for device in about["devices"] if device != "cpu"]
    files = gpu_device_files()
    if gpus:
        # Without device files nothing can be locked, and CUDA itself decides which GPU a process gets.
        usable = ", ".join(visible_gpus(files)) or "all, without leases"
        yield f"CUDA {about['cuda']}, driver {about['driver'] or 'unknown'}: {', '.join(gpus)} (leased: {usable})"
    elif about["cuda"] is None:
        text = "no GPU: this build of torch has no CUDA"
        if files:
            text += f", and the machine has {', '.join(files)}"
        yield text
    elif files:
        yield f"no GPU: torch is built for CUDA {about['cuda']}, and can't use {', '.join(files)}"
    else:
        yield f"no GPU: torch is built for CUDA {about['cuda']}, and the machine shows none"


def survey_cells(matrix: Matrix) -> Survey:
    """Which of the planned cells can run here, and how many cannot, by reason.

    Each model is made once on each device and in each dtype, but not run; each wrapper is looked up, and what its ranks
    need (torch.distributed, gloo or NCCL, the fake process group, NumPy).
    Raises :class:`UsageError` for a mistake in the matrix or in a factory.
    """
    # What there is to say, by what it depends on: a matrix of thousands of cells has few models and wrappers.
    missing_for_model: dict[Any, str] = {}
    missing_for_ranks: dict[tuple[str, str], str] = {}
    why_not: Counter[str] = Counter()
    runnable = []
    for planned in matrix.cells:
        cell = planned.cell
        if planned.outcome == "skip":
            why_not[f"a rule skips it: {planned.reason}"] += 1
            continue
        model = (cell.model, cell.device, cell.dtype, cell.user, cell.backend, gpus_of(cell))
        if model not in missing_for_model:
            missing_for_model[model] = _missing_for_model(matrix, planned)
        pair = (cell.wrapper, cell.device)
        if pair not in missing_for_ranks:
            missing_for_ranks[pair] = _missing_for_ranks(matrix, planned)
        why = missing_for_model[model] or missing_for_ranks[pair]
        if why:
            why_not[why] += 1
        else:
            runnable.append(planned)
    return Survey(tuple(runnable), why_not)


def try_training(matrix: Matrix, runnable: tuple[PlannedCell, ...]) -> TriedCell | None:
    """Run the first training cell of one rank, in a rank process as a run of the matrix would; None if there is none.

    What the checks say of the model is not asked: a cell that fails them has run.
    """
    chosen = _first_training_cell(runnable)
    if chosen is None:
        return None
    processes = open_processes()
    execution = Execution(matrix, Settings.read(lambda option: option.default), processes.folder)
    try:
        result = execution.cell_result(chosen, ("compiles",), ("compiles",))
    finally:
        execution.close()
        processes.close()
    judged = result.judgements["compiles"]
    problems: list[str] = []
    # Other verdicts are about the model, which has run.
    if judged.verdict in ("error", "crash", "timeout"):
        for problem in judged.problems:
            problems += filter(None, (problem.message, problem.hint))
    return TriedCell(chosen.cell.id, result.seconds, tuple(problems))


def _first_training_cell(runnable: tuple[PlannedCell, ...]) -> PlannedCell | None:
    """The first one of one process."""
    for planned in runnable:
        if planned.cell.phase == "training" and Wrapping.read(planned.cell.wrapper).processes == 1:
            return planned
    return None


def _missing_for_ranks(matrix: Matrix, planned: PlannedCell) -> str:
    from pytest_torchcompile.wrappers import process_group as group
    from pytest_torchcompile.wrappers import protocol

    where = matrix.models[planned.cell.model].where
    try:
        group.refuse_unavailable(planned.cell, protocol.load(planned.cell.wrapper, matrix.root, where), where)
    except Unavailable as why:
        return str(why)
    return ""


def _missing_for_model(matrix: Matrix, planned: PlannedCell) -> str:
    from pytest_torchcompile.run import subject

    cell, entry = planned.cell, matrix.models[planned.cell.model]
    gpus = visible_gpus(gpu_device_files())
    # Without a GPU a cell of CUDA is told of below, by what its device says.
    if gpus and (needed := gpus_of(cell)) > len(gpus):
        return f"it needs {count(needed, 'GPU')}, and this machine has {len(gpus)} to use"
    try:
        subject.compile_settings(cell, matrix.root, entry.where)
        subject.build_model(entry, cell, matrix.root, 0)
    except Unavailable as why:
        return str(why)
    except MemoryError as why:
        raise UsageError(f"{entry.where}: the model does not fit into memory: {why}") from why
    return ""
