"""inner_autocast: the module enters autocast itself, in its forward, from here on."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def inner_autocast(model: torch.nn.Module, choice: str) -> None:
    """``bfloat16``: the forward of the whole module runs under autocast to it, as its author would write it."""
    dtype = getattr(torch, choice)
    kind: Any = type(model)
    device = next((each.device.type for each in model.parameters()), "cpu")

    class Autocasting(kind):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype=dtype):
                return super().forward(*args, **kwargs)

    # As torch's own parametrisations do it: the object stays, with all that is registered on it.
    model.__class__ = Autocasting


def _choices(module: Any, batch: Any) -> list[str]:
    parameters = list(module.parameters())
    if any(parameter.dtype != torch.float32 for parameter in parameters):
        return []
    # Only parameters tell the module where it computes.
    if not parameters and any(tensor.device.type != "cpu" for tensor in batch.tensors()):
        return []
    return ["bfloat16", "float16"]


MUTATION = Mutation("inner_autocast", "a module that enters autocast itself", "module", _choices, inner_autocast)
