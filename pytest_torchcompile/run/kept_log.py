"""The log of torch's that a cell keeps, in a file of its name (``--compile-logs``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from pytest_torchcompile.cell import Cell, file_word
from pytest_torchcompile.ledger.torch_logs import TRACE, logged_channels, traced_to_file
from pytest_torchcompile.observation import Job

__all__ = ["begin_nothing", "kept_log"]


def begin_nothing(heading: str) -> None:
    """Without a log there is nothing to head."""


@contextlib.contextmanager
def kept_log(job: Job) -> Iterator[Callable[[str], None]]:
    """Write what torch logs of the cell into files of its name, one for each rank.

    Gives what begins a part under a heading: a check or a search that runs the model again does so by backends of its
    own, and what torch then says (``BACKEND_MATCH``) is not the cell's.
    """
    begin_part: Callable[[str], None] = begin_nothing
    with contextlib.ExitStack() as kept:
        if job.logs:
            name = file_word(Cell.from_dict(job.cell).id)
            if job.world > 1:
                # Ranks log at once, and their lines would mix.
                name += f".rank{job.rank}"
            folder = Path(job.log_folder)
            channels = tuple(channel for channel in job.logs if channel != TRACE)
            if TRACE in job.logs:
                kept.enter_context(traced_to_file(folder / f"{name}.trace.log"))
            if channels:
                begin_part = kept.enter_context(logged_channels(channels, folder / f"{name}.log"))
        yield begin_part
