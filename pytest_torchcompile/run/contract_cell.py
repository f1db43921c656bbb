"""The program of a cell for the contract's worker, which is told this function by its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry

if TYPE_CHECKING:
    from torch import nn

    from pytest_torchcompile.batch import Batch
    from pytest_torchcompile.contract.history_run import Program

__all__ = ["program_of"]


def program_of(data: Mapping[str, Any]) -> Program:
    """``data``: a job as :func:`dataclasses.asdict` has it."""
    import torch

    from pytest_torchcompile.contract.history_run import Program
    from pytest_torchcompile.gauges.compiler import set_compile_threads
    from pytest_torchcompile.run import subject

    job = Job(**data)
    cell, entry, root = Cell.from_dict(job.cell), ModelEntry.from_dict(job.entry), Path(job.root)
    # As in the rank that ran the cell: sums differ with the number of threads.
    if job.threads:
        torch.set_num_threads(job.threads)
    set_compile_threads(job.compile_threads)

    def make_model() -> nn.Module:
        return subject.build_model(entry, cell, root, job.seed)

    def batch(sizes: Mapping[str, int], seed: int) -> Batch:
        return subject.make_batch(entry, cell, root, seed, sizes)

    return Program(make_model, subject.compile_settings(cell, root, entry.where), batch,
                   subject.loss_function(entry, root), cell.phase == "training", job.seed)
