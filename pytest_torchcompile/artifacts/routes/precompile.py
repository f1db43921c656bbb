"""precompile: ``torch.compiler.precompile``, a function in torch 2.14 and a module in 2.15. Not run by this version."""

from __future__ import annotations

from pathlib import Path

from pytest_torchcompile.artifacts.route import Route
from pytest_torchcompile.contract.history_run import Program
from pytest_torchcompile.fuzz.drawn_call import Sequence

__all__ = ["ROUTE"]


def _ship(program: Program, declared: Sequence, folder: Path) -> None:
    raise NotImplementedError("precompile is skipped in every version of torch")


def _load(folder: Path) -> None:
    raise NotImplementedError("precompile is skipped in every version of torch")


def _missing(version: tuple[int, int], trains: bool) -> str:
    told = ".".join(map(str, version))
    if version < (2, 14):
        return f"torch {told} has no torch.compiler.precompile; it came with 2.14"
    return f"torch.compiler.precompile of torch {told} is a prototype, which pytest-torchcompile does not run yet"


ROUTE = Route("precompile", _ship, _load, _missing)
