"""aot_inductor: ``aoti_compile_and_package``, and ``aoti_load_package`` in another process.

The package has the weights inside. It checks its inputs only where ``AOTI_RUNTIME_CHECK_INPUTS=1`` is set when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.artifacts.route import Route, asked_of_torch
from pytest_torchcompile.contract.history_run import Program
from pytest_torchcompile.fuzz.drawn_call import Sequence

__all__ = ["ROUTE"]

_FILE = "model.pt2"


def _ship(program: Program, declared: Sequence, folder: Path) -> None:
    from torch._inductor import aoti_compile_and_package

    batch = program.batch(dict(declared[0].sizes), program.seed)
    model = program.make_model()
    with asked_of_torch():
        with torch.no_grad():
            exported = torch.export.export(model, tuple(batch.args), dict(batch.kwargs))
        aoti_compile_and_package(exported, package_path=str(Path(folder, _FILE)))


def _load(folder: Path) -> Callable[[nn.Module], Callable[..., Any]]:
    from torch._inductor import aoti_load_package

    with asked_of_torch():
        package: Any = aoti_load_package(str(Path(folder, _FILE)))

    def bind(module: nn.Module) -> Callable[..., Any]:
        # The weights are in the package.
        return package  # type: ignore[no-any-return]

    return bind


def _missing(version: tuple[int, int], trains: bool) -> str:
    if trains:
        return "AOTInductor's package has no backward pass"
    return ""


ROUTE = Route("aot_inductor", _ship, _load, _missing, takes_module=False)
