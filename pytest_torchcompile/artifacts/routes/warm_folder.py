"""warm_folder: a second process on the cache folder that a first one has filled compiles nothing."""

from __future__ import annotations

from pathlib import Path

from pytest_torchcompile.artifacts.route import Route
from pytest_torchcompile.contract.history_run import Program, run_history
from pytest_torchcompile.fuzz.drawn_call import Sequence

__all__ = ["ROUTE"]


def _ship(program: Program, declared: Sequence, folder: Path) -> None:
    # Run as the second process runs it, so that both ask the caches for the same graphs.
    run_history(program, declared, lambda index, side: None)


def _load(folder: Path) -> None:
    return None


def _missing(version: tuple[int, int], trains: bool) -> str:
    return ""


ROUTE = Route("warm_folder", _ship, _load, _missing, cached=True)
