"""aot_compile: ``torch.compile(model).forward.aot_compile(...)``, saved, and loaded by another process.

Guards on globals are dropped (torch/_dynamo/aot_compile.py: aot_compile_fullgraph, torch 2.13). Hooks that the module
had are inside, and those that are registered later are not called: Dynamo asks no guards of hooks by default
(torch/_dynamo/config.py: skip_nnmodule_hook_guards).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.artifacts.route import Route, asked_of_torch
from pytest_torchcompile.contract.history_run import Program
from pytest_torchcompile.fuzz.drawn_call import Sequence

__all__ = ["ROUTE"]

_FILE = "aot_compiled.bin"
_FIRST = (2, 9)
_BY_DEFAULT = (2, 12)
"""Until then ``torch._dynamo.config.enable_aot_compile`` is off."""


def _ship(program: Program, declared: Sequence, folder: Path) -> None:
    batch = program.batch(dict(declared[0].sizes), program.seed)
    model, settings = program.make_model(), {**program.settings, "fullgraph": True}
    with asked_of_torch(), torch.set_grad_enabled(program.train):
        compiled: Any = torch.compile(model, **settings)
        artifact = compiled.forward.aot_compile((tuple(batch.args), dict(batch.kwargs)))
        artifact.save_compiled_function(str(Path(folder, _FILE)))


def _load(folder: Path) -> Callable[[nn.Module], Callable[..., Any]]:
    with Path(folder, _FILE).open("rb") as file, asked_of_torch():
        artifact: Any = torch.compiler.load_compiled_function(file)

    def bind(module: nn.Module) -> Callable[..., Any]:
        return functools.partial(artifact, module)

    return bind


def _missing(version: tuple[int, int], trains: bool) -> str:
    told = ".".join(map(str, version))
    if version < _FIRST:
        return f"torch {told} has no aot_compile; it came with 2.9"
    if version < _BY_DEFAULT:
        return f"in torch {told} aot_compile is off by default (torch._dynamo.config.enable_aot_compile); it is on " \
               "from 2.12 on"
    return ""


ROUTE = Route("aot_compile", _ship, _load, _missing)
