"""A prepared run: a cell of one rank in a fresh process, under the settings that its rank has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.gauges.autotune import limit_autotuning
from pytest_torchcompile.gauges.compiler import set_compile_threads
from pytest_torchcompile.loading import import_all
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.run.runner import Run
from pytest_torchcompile.state.torch_state import same_random_draws
from pytest_torchcompile.wrappers.protocol import load as load_wrapper

__all__ = ["prepared_run"]


@contextmanager
def prepared_run(job: Job) -> Iterator[Run]:
    """The cell, built and not yet run."""
    root = Path(job.root)
    torch.set_num_threads(job.threads or torch.get_num_threads())
    set_compile_threads(job.compile_threads)
    import_all(job.modules, root)
    cell = Cell.from_dict(job.cell)
    wrapper = load_wrapper(cell.wrapper, root, ModelEntry.from_dict(job.entry).where)
    with same_random_draws(), limit_autotuning(job.autotune_choices):
        yield Run(job, cell, wrapper)
