"""frozen: parameters that get no gradient from here on."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def frozen(model: torch.nn.Module, choice: str) -> None:
    """``first``: the first half of the parameters is frozen, the others are not."""
    parameters = list(model.parameters())
    half = (len(parameters) + 1) // 2
    frozen_ones = {"first": parameters[:half], "last": parameters[half:], "all": parameters, "none": []}[choice]
    for parameter in parameters:
        parameter.requires_grad_(not any(parameter is each for each in frozen_ones))


def _choices(module: Any, batch: Any) -> list[str]:
    floating = [parameter.is_floating_point() for parameter in module.parameters()]
    if not floating or not all(floating):
        return []
    return ["first", "last", "all", "none"]


MUTATION = Mutation("frozen", "parameters without gradients", "module", _choices, frozen)
