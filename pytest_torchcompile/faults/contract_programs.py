"""Programs on which a contract is broken or kept: two inputs, Python objects, one layer, a cell, dropout."""

# ruff: noqa: N803 -- dims have capital letters

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from pytest_torchcompile.faults.fault_parts import Program

__all__ = ["CELL", "CELL_ON_CPU", "DROPPED", "PROGRAM", "ROWS", "WEIGHTED"]


class Images(nn.Module):
    """A convolution and a linear layer, of two inputs. (B, 4, 6, 6), (B, 4, 6, 6) -> (B, 4, 6, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mixed = nn.Conv2d(4, 4, 1), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor, factor: float = 1.0, added: bool = False) -> Any:
        mixed = torch.tanh(self.mixed(self.stem(x) * factor + y))
        return mixed + y if added else mixed


def pairs(B: int) -> Any:
    """Two tensors of (B, 4, 6, 6), a number and a flag."""
    return (torch.randn(B, 4, 6, 6), torch.randn(B, 4, 6, 6)), {"factor": 1.5, "added": True}


class Mode(enum.Enum):
    """How rows are weighted."""

    PLAIN = 1
    DOUBLED = 2


@dataclass
class Weighting:
    """How much of what."""

    scale: float = 1.5
    added: bool = True


class Weighted(nn.Module):
    """A linear layer, and Python objects that say what becomes of it. (B, 6) -> (B, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(6, 6)

    def forward(self, x: Tensor, mode: Mode, weighting: Weighting) -> Tensor:
        mixed = torch.tanh(self.mixed(x)) * weighting.scale
        if mode is Mode.DOUBLED:
            mixed = mixed * 2
        return mixed + x if weighting.added else mixed


def weighted_rows(B: int) -> Any:
    """A tensor of (B, 6), a member of an enum and a dataclass."""
    return torch.randn(B, 6), Mode.PLAIN, Weighting()


class Rows(nn.Module):
    """A linear layer. (B, 6) -> (B, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mixed(x))


def rows(B: int) -> Tensor:
    """(B, 6)."""
    return torch.randn(B, 6)


def cell() -> nn.Module:
    """(B, 6) -> (B, 5) twice."""
    return nn.LSTMCell(6, 5)


class Dropped(Images):
    """With dropout in training."""

    def forward(self, x: Tensor, y: Tensor, factor: float = 1.0, added: bool = False) -> Any:
        return nn.functional.dropout(super().forward(x, y, factor, added), 0.25, self.training)


PROGRAM: Final = Program(Images, pairs, ({"B": 2},))
WEIGHTED: Final = Program(Weighted, weighted_rows, ({"B": 2},))
ROWS: Final = Program(Rows, rows, ({"B": 2},))
CELL: Final = Program(cell, rows, ({"B": 2},))
CELL_ON_CPU: Final = replace(CELL, cpu_only="on a GPU that backward does not raise (torch 2.11)")
DROPPED: Final = Program(Dropped, pairs, ({"B": 2},))
