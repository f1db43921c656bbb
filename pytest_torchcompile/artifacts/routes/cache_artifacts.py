"""cache_artifacts: ``torch.compiler.save_cache_artifacts()``, taken by a process with another cache folder."""

from __future__ import annotations

from pathlib import Path

import torch

from pytest_torchcompile.artifacts.route import Refused, Route, asked_of_torch
from pytest_torchcompile.contract.history_run import Program, run_history
from pytest_torchcompile.fuzz.drawn_call import Sequence

__all__ = ["ROUTE"]

_FILE = "cache_artifacts.bin"


def _ship(program: Program, declared: Sequence, folder: Path) -> None:
    run_history(program, declared, lambda index, side: None)
    with asked_of_torch():
        saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        raise Refused("torch.compiler.save_cache_artifacts() has nothing to save")
    data, _ = saved
    Path(folder, _FILE).write_bytes(data)


def _load(folder: Path) -> None:
    data = Path(folder, _FILE).read_bytes()
    with asked_of_torch():
        taken = torch.compiler.load_cache_artifacts(data)
    if taken is None:
        raise Refused("torch.compiler.load_cache_artifacts() took nothing of what was saved")


def _missing(version: tuple[int, int], trains: bool) -> str:
    return ""


ROUTE = Route("cache_artifacts", _ship, _load, _missing, cached=True, moved=True)
