"""CellTrial: the trial of one cell, as the checks and the fuzzer see it. Who makes it is the runner."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.observation import Job
from pytest_torchcompile.oracle.trial import Trial
from pytest_torchcompile.wrappers.protocol import Wrapper

__all__ = ["CellTrial"]


class CellTrial(Trial):
    """What a check's ``measure`` may ask for, beyond what every trial has."""

    cell: Cell
    job: Job
    wrapper: Wrapper
    dims: Mapping[str, Dim]
    """The dims of the cell's model."""
    matrix: str
    """Path of the matrix file."""

    @abstractmethod
    def batch(self, sizes: Mapping[str, int], seed: int) -> Batch:
        """Another batch for the cell's model, drawn with ``seed``."""
