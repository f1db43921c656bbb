"""Process-wide state that every compiled frame is guarded on: what it is now."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

__all__ = ["changed"]

_NAMES: Final = re.compile(r"^GLOBAL_STATE changed: (.*)$")


_PLAINER: Final = {"allow_tf32": "float32_matmul_precision"}


def _readers() -> dict[str, Callable[[], object]]:
    """Names as ``GlobalStateGuard::reason`` (torch/csrc/dynamo/guards.cpp) gives them, torch 2.8 to 2.15."""
    import torch

    return {
        "grad_mode": torch.is_grad_enabled,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "num_threads": torch.get_num_threads,
        "default_dtype": torch.get_default_dtype,
        "allow_tf32": torch.get_float32_matmul_precision,
        "autocast": lambda: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
        "autocast(cpu)_enabled": lambda: torch.is_autocast_enabled("cpu"),
        "autocast(cuda)_enabled": lambda: torch.is_autocast_enabled("cuda"),
        "autocast(cpu)_dtype": lambda: torch.get_autocast_dtype("cpu"),
        "autocast(cuda)_dtype": lambda: torch.get_autocast_dtype("cuda"),
    }


def changed(guard: str) -> tuple[str, str, str]:
    """What changed, what it was, what it is: empty texts where that is not known.

    A switch was the opposite before; of other values torch does not tell the old one.
    """
    match = _NAMES.match(guard)
    if not match:
        return "", "", ""
    names = match[1].split()
    for name in names:
        if (read := _readers().get(name)) is not None:
            now = read()
            name = _PLAINER.get(name, name)
            return name, str(not now) if isinstance(now, bool) else "", str(now)
    return " ".join(names), "", ""
