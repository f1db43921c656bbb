"""precompile: ``torch.compiler.precompile``, which writes a Python file and a cache, and a process that loads both.

A function in torch 2.14 (``torch._precompile._PrecompileApi``), a module with ``capture`` and ``load`` from 2.15 on; a
prototype in both. It traces one call and has no guards: its driver asks names, shapes, dtypes and layouts of parameters
and inputs, and nothing of flags, globals or hooks (Note [precompile programming model] in torch/_precompile.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.artifacts.route import Route, asked_of_torch
from pytest_torchcompile.contract.history_run import Program
from pytest_torchcompile.fuzz.drawn_call import Sequence

__all__ = ["ROUTE"]

_CODE = "precompiled.py"
_CACHE = "precompiled.cache"
_FIRST = (2, 14)


def _whole_model(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What is traced. It takes positional arguments alone, and of those any that pytree knows."""
    return model(*args, **kwargs)


def _ship(program: Program, declared: Sequence, folder: Path) -> None:
    batch = program.batch(dict(declared[0].sizes), program.seed)
    given = (program.make_model(), tuple(batch.args), dict(batch.kwargs))
    code, cache = Path(folder, _CODE), Path(folder, _CACHE)
    precompile: Any = torch.compiler.precompile  # type: ignore[attr-defined]
    with asked_of_torch(), torch.no_grad():
        if callable(precompile):
            text, data = precompile(_whole_model, *given)
            code.write_text(text, encoding="utf-8")
            cache.write_bytes(data)
            return
        with precompile.capture(_whole_model, artifact_path=str(code), cache_path=str(cache)) as capture:
            capture(*given)


def _load(folder: Path) -> Callable[[nn.Module], Callable[..., Any]]:
    code, cache = Path(folder, _CODE), Path(folder, _CACHE)
    precompile: Any = torch.compiler.precompile  # type: ignore[attr-defined]
    with asked_of_torch():
        if callable(precompile):
            artifact = precompile.load(code.read_text(encoding="utf-8"), cache.read_bytes())
        else:
            artifact = precompile.load(str(code), str(cache))

    def bind(module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return artifact(module, args, kwargs)

        return call

    return bind


def _missing(version: tuple[int, int], trains: bool) -> str:
    told = ".".join(map(str, version))
    if version < _FIRST:
        return f"torch {told} has no torch.compiler.precompile; it came with 2.14"
    if trains:
        return "what torch.compiler.precompile makes of a forward has no backward pass"
    return ""


# A call in training has a backward pass, and the artifact has none.
ROUTE = Route("precompile", _ship, _load, _missing, takes_module=False, moved=True)
