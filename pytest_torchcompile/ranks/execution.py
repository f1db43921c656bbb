"""Execution: the side of pytest that has cells run, and keeps what came of them. No torch, no pytest."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import NoRank, TorchcompileError, UsageError
from pytest_torchcompile.observation import NO_RANK, Failure, Job, Judgement, Observation, RankOutcome
from pytest_torchcompile.plan.matrix import Matrix, PlannedCell
from pytest_torchcompile.quantity import count
from pytest_torchcompile.ranks.gpus import Leases, open_leases
from pytest_torchcompile.ranks.known_mistakes import KnownMistakes
from pytest_torchcompile.ranks.rank_group import Group, cell_observation
from pytest_torchcompile.ranks.torchrun import Nodes, Torchrun
from pytest_torchcompile.reuse.cell_reuse import CellReuse, why_always_run
from pytest_torchcompile.reuse.code_reuse import CodeReuse, EarlierComparisons
from pytest_torchcompile.run.settings import Settings
from pytest_torchcompile.run.verdicts import apply_xfail, judge_observation
from pytest_torchcompile.system import can_lock_files, usable_cores
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["CellResult", "Execution", "gpus_of", "threads_to_compile", "threads_to_run"]

# Threads that compile a cell on a GPU, where the machine has twice as many cores.
_LEAST_ON_GPU = 8
NO_LEASES = "on this system GPUs cannot be leased, so cells on a GPU run without -n"
TIMED = "worth"
"""The check whose cell has its GPU alone."""


@dataclass(frozen=True)
class CellResult:
    """What came of one cell: a judgement for each check that was asked for, and what they rest on."""

    judgements: dict[str, Judgement]
    observation: Observation
    seconds: float
    """Wall seconds of the whole cell."""
    reused: dict[str, Any] | None = None
    """The earlier run that this is of (:class:`~pytest_torchcompile.reuse.cell_reuse.EarlierResult`), if it is one, or
    of which its comparisons are (:class:`~pytest_torchcompile.reuse.code_reuse.EarlierComparisons`)."""
    why_run: str = ""
    """Why no earlier result could be taken, or why this one can't be kept; empty where nobody wants to."""

    def carried(self) -> dict[str, Any]:
        """What the first verdict of a cell brings for all of them, as plain data."""
        carried: dict[str, Any] = {"observation": self.observation.to_dict(), "seconds": self.seconds}
        if self.reused is not None:
            carried["reused"] = self.reused
        if self.why_run:
            carried["why_run"] = self.why_run
        return carried


@dataclass(frozen=True)
class _Brought:
    """What the ranks of a cell hand over besides their observations."""

    comparisons: dict[str, Any] = field(default_factory=dict)
    """``taken`` from an earlier run, and ``made``; empty where nobody keeps any."""
    read: list[Mapping[str, Any]] = field(default_factory=list)
    """Of each rank that has not crashed the files and variables that it read, where they are watched."""


@dataclass
class Execution:
    """Runs each planned cell once, in a rank process or, for debuggers, in this one."""

    matrix: Matrix
    settings: Settings
    folder: Path | None = None
    """The run's folder (:mod:`pytest_torchcompile.ranks.zygotes`); None runs cells in this process."""
    unable: str = ""
    """Why no rank process can be had; then no cell is run any more."""
    workers: int = 1
    """pytest processes that run cells at the same time."""
    torchrun: Torchrun | None = None
    """Where torchrun has started this pytest for one rank of each cell."""
    reuse: CellReuse | None = None
    """What earlier runs have kept; None runs every cell."""
    code_reuse: CodeReuse | None = None
    """Comparisons that earlier runs have kept; None makes all."""
    start_ranks: Callable[[], None] | None = None
    """Sees to it that rank processes can be had; called before each cell that is run."""
    keep_code: Callable[[Mapping[str, str]], None] | None = None
    """Takes the code that the compiler has made of a cell, by key; None drops it."""
    log_folder: str = ""
    """Where torch's log of each cell is written, if it is wanted."""
    warm_toolchain: bool = False
    """Have each cell begin with a compiler that is warm, whatever its caches hold."""
    _group: Group | None = None
    """The ranks on this machine."""
    _nodes: Nodes | None = None
    """This node's rank, where torchrun has started several."""
    _leases: Leases | None = None
    _mistakes: KnownMistakes = field(default_factory=KnownMistakes)
    _done: dict[str, CellResult] = field(default_factory=dict)

    def cell_result(self, planned: PlannedCell, selected: Sequence[str], applicable: Sequence[str]) -> CellResult:
        """Run the cell if it was not run yet.

        ``selected`` are the checks that this run judges, ``applicable`` all that the matrix has for the cell.
        """
        key = planned.cell.id
        if key not in self._done:
            self._done[key] = self._run_cell(planned, selected, applicable)
        return self._done[key]

    def close(self) -> None:
        """End the rank processes, whatever they are doing."""
        if self._group is not None:
            self._group.close()
        if self._nodes is not None:
            self._nodes.close()

    def earlier_result(self, planned: PlannedCell, selected: Sequence[str]) -> CellResult | str:
        """The result that an earlier run has kept and that still holds and passes; or why the cell is to be run."""
        if self.reuse is None:
            return ""
        found = self.reuse.look_up(planned, self._make_job(planned, selected))
        if isinstance(found, str):
            return found
        judgements = judge_observation(found.observation, selected, planned.limits)
        if not _all_pass(judgements):
            return "its kept result does not pass"
        return CellResult(judgements, found.observation, found.seconds, found.origin)

    def _run_cell(self, planned: PlannedCell, selected: Sequence[str], applicable: Sequence[str]) -> CellResult:
        if planned.outcome == "skip":
            observation = Observation(planned.cell.id, failure=Failure("skip", planned.reason))
            return CellResult(self._judge(planned, observation, selected, applicable), observation, 0.0)
        earlier = self.earlier_result(planned, selected)
        if isinstance(earlier, CellResult):
            return earlier
        job = self._make_job(planned, selected)
        mistaken = self._mistakes.observation_of(planned.cell, job)
        # The nodes of torchrun have to run the same cells, whatever one of them knows.
        if mistaken is not None and self.torchrun is None:
            return CellResult(self._judge(planned, mistaken, selected, applicable), mistaken, 0.0)
        known = EarlierComparisons({}, ())
        if self.code_reuse is not None:
            known = self.code_reuse.look_up(planned, job)
            job = replace(job, comparisons=known.leaves)
        outcomes = self._cell_outcomes(planned.cell, job)
        brought = self._take_what_was_brought(outcomes)
        observation = cell_observation(planned.cell.id, outcomes)
        self._mistakes.note(planned.cell, job, observation)
        seconds = max(outcome.seconds for outcome in outcomes)
        judgements = self._judge(planned, observation, selected, applicable)
        taken = brought.comparisons.get("taken")
        result = CellResult(judgements, observation, seconds, known.origin(taken) if taken else None, earlier)
        if self.reuse is None:
            return result
        if not _all_pass(judgements):
            # Of what always runs that is said already.
            if why_always_run(planned, job):
                return result
            return replace(result, why_run=f"{earlier}; this one does not pass, and is not kept")
        if len(brought.read) < len(outcomes):
            return result
        not_kept = self.reuse.keep(planned, job, observation, seconds, brought.read, result.reused)
        self._keep_comparisons(planned, job, observation, known, brought)
        return replace(result, why_run=not_kept or earlier)

    def _take_what_was_brought(self, outcomes: Sequence[RankOutcome]) -> _Brought:
        """Take out of each rank's value what is no part of a report."""
        brought = _Brought()
        for outcome in outcomes:
            # A rank that crashed has no value, and has told of no file.
            value = outcome.value or {}
            brought.comparisons.update(value.pop("comparisons", None) or {})
            texts = value.pop("code_texts", None)
            if texts and self.keep_code is not None:
                self.keep_code(texts)
            if "read" in value:
                brought.read.append(value.pop("read"))
        return brought

    def _keep_comparisons(self, planned: PlannedCell, job: Job, observation: Observation, known: EarlierComparisons,
                          brought: _Brought) -> None:
        """Keep what was compared in a cell that passed; an entry is of one run, so nothing of a part of one."""
        comparisons = brought.comparisons
        if self.code_reuse is None or not comparisons:
            return
        if comparisons["taken"]:
            self.code_reuse.mark_used(known, comparisons["taken"])
        elif comparisons["made"]:
            self.code_reuse.keep(planned, job, observation, comparisons["made"], brought.read)

    def _judge(self, planned: PlannedCell, observation: Observation, selected: Sequence[str],
               applicable: Sequence[str]) -> dict[str, Judgement]:
        judgements = judge_observation(observation, selected, planned.limits)
        return apply_xfail(judgements, planned, complete=set(selected) >= set(applicable))

    def _make_job(self, planned: PlannedCell, selected: Sequence[str]) -> Job:
        ranks = Wrapping.read(planned.cell.wrapper).processes
        cores = usable_cores()
        # What finds out more must not turn a failure into a timeout.
        locate = self.settings.timeout / 4
        if planned.outcome == "xfail":
            # An expected failure is known.
            locate = 0.0
        return Job(
            cell=planned.cell.to_dict(),
            entry=self.matrix.models[planned.cell.model].to_dict(),
            root=str(self.matrix.root),
            checks=tuple(selected),
            limits=planned.limits,
            locate=locate,
            culprit=self.settings.culprit,
            modules=self.matrix_modules,
            fuzz=self.settings.fuzz.of_cells(self.matrix.fuzz_seconds, self.matrix.root).to_dict(),
            threads=_omp_threads() or threads_to_run(cores, ranks, planned.cell.device),
            compile_threads=threads_to_compile(cores, self.workers, ranks, planned.cell.device),
            warm_toolchain=self.warm_toolchain,
            autotune_choices=self.matrix.autotune_choices,
            logs=self.settings.logs,
            log_folder=self.log_folder,
            watched=self.reuse is not None,
        )

    @property
    def matrix_modules(self) -> tuple[str, ...]:
        """Every module that a model of the matrix is made from."""
        modules: set[str] = set()
        for model in self.matrix.models.values():
            for target in filter(None, (model.factory, model.inputs, model.loss)):
                modules.add(target.partition(":")[0])
        return tuple(sorted(modules))

    def _cell_outcomes(self, cell: Cell, job: Job) -> list[RankOutcome]:
        """Run the cell; a fault of our own processes, files or locks is its error and nobody else's."""
        if self.start_ranks is not None:
            self.start_ranks()
        if self.unable:
            return [RankOutcome(NO_RANK, message=self.unable)]
        try:
            return self._on_gpus(cell, job)
        except UsageError:
            raise
        # Remembered: the next cell would wait for the same time-out, and fail as this one.
        except NoRank as error:
            self.unable = str(error)
            return [RankOutcome(NO_RANK, message=self.unable, evidence=error.evidence)]
        except TorchcompileError as error:
            # Of a lease, which another cell may well get.
            return [RankOutcome(NO_RANK, message=str(error))]
        except OSError as error:
            # The folder of the run is full, or somebody has removed it.
            return [RankOutcome(NO_RANK, message=f"the run's own files in {self.folder} can't be used: {error}")]

    def _on_gpus(self, cell: Cell, job: Job) -> list[RankOutcome]:
        """Run the cell while it holds the GPUs that it needs; without a lease where there are none to share."""
        ranks = Wrapping.read(cell.wrapper).processes
        wanted = gpus_of(cell)
        # torchrun's ranks have the GPUs that whoever started it gave them.
        if not wanted or self.folder is None or self.torchrun is not None:
            return self._run_ranks(job, ranks)
        if not can_lock_files() and self.workers > 1:
            return [RankOutcome("skip", message=NO_LEASES)]
        if self._leases is None:
            self._leases = open_leases(self.settings.workers_per_gpu)
        if self._leases is None or not self._leases.gpus:
            return self._run_ranks(job, ranks)
        if wanted > len(self._leases.gpus):
            why = f"it needs {count(wanted, 'GPU')}, and this machine has {len(self._leases.gpus)} to use"
            return [RankOutcome("skip", message=why)]
        with self._leases.hold_gpus(wanted, alone=TIMED in job.checks, name=cell.id) as gpus:
            return self._run_ranks(job, ranks, gpus)

    def _run_ranks(self, job: Job, ranks: int, gpus: tuple[str, ...] = ()) -> list[RankOutcome]:
        if self.folder is None:
            return self._run_here(job, ranks)
        if ranks > 1:
            # What a rank finds out alone, while the others are elsewhere, ends in a collective that nobody joins.
            job = replace(job, locate=0.0)
        if self.torchrun is not None:
            if self._nodes is None:
                self._nodes = Nodes(self.folder, self.torchrun)
            outcomes = self._nodes.run(job, ranks, sys.path, self.settings.timeout)
        else:
            if self._group is None:
                self._group = Group(self.folder)
            outcomes = self._group.run(job, ranks, sys.path, self.settings.timeout, gpus)
        if self.settings.isolation == "cell":
            self.close()
        return outcomes

    def _run_here(self, job: Job, ranks: int) -> list[RankOutcome]:
        """Run the cell in this process, for debuggers."""
        if ranks > 1:
            why = f"wrapper {job.cell['wrapper']!r} needs {ranks} rank processes; --compile-inprocess has none"
            return [RankOutcome("skip", message=why)]
        from pytest_torchcompile.ranks.serving import execute_job

        with warnings.catch_warnings():
            # As in a rank process: pytest's filters are for the user's tests.
            warnings.simplefilter("ignore")
            answer = execute_job({"do": "cell", "job": job, "path": []})
        return [RankOutcome("done", answer["value"])]


def _all_pass(judgements: Mapping[str, Judgement]) -> bool:
    return all(judgement.verdict == "pass" for judgement in judgements.values())


def gpus_of(cell: Cell) -> int:
    """How many GPUs a cell needs: one for each rank, and as many as make its device's number one of them."""
    kind, _, number = cell.device.partition(":")
    if kind != "cuda":
        return 0
    return max(Wrapping.read(cell.wrapper).processes, int(number or 0) + 1)


def threads_to_run(cores: int, ranks: int, device: str) -> int:
    """How many threads each rank of a cell runs operators of the CPU with.

    The number is part of the key of Inductor's caches, so it does not depend on the workers. Beside a GPU it is one:
    what is left for the CPU are small tables, and threads that wait for each other keep cores from those who compile.
    """
    if _is_on_gpu(device):
        return 1
    return max(1, min(cores, 4) // ranks)


def threads_to_compile(cores: int, workers: int, ranks: int, device: str) -> int:
    """How many threads Inductor compiles a cell's kernels with, in each rank.

    Cells on a GPU have eight, or as many as half the cores, however many workers there are. Triton compiles many
    kernels, and the last cells of a run have the machine to themselves.
    """
    threads = cores // workers
    if _is_on_gpu(device):
        threads = max(threads, min(_LEAST_ON_GPU, cores // 2))
    return max(1, threads // ranks)


def _is_on_gpu(device: str) -> bool:
    return device.partition(":")[0] == "cuda"


def _omp_threads() -> int:
    """The user's OMP_NUM_THREADS (of the outer level, where it is a list), or 0."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(given) if given.isdigit() else 0
