"""second_copy: a deep copy is compiled too and called, or the module itself is compiled a second time."""

from __future__ import annotations

import copy
from typing import Any

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def second_copy(model: Any, compile: Any, choice: str) -> Any:
    """``copy``: a copy in the module's present state. ``again``: the module by another ``torch.compile``."""
    if choice == "copy":
        model = copy.deepcopy(model)
    if compile is None:
        return model, model
    compile.cache_clear()
    return model, compile(model)


def _choices(module: Any, batch: Any) -> list[str]:
    return ["again", "copy"]


MUTATION = Mutation("second_copy", "a second compiled copy", "call", _choices, second_copy)
