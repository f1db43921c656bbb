"""grad_mode: the forward runs without gradients, or in inference mode."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def grad_mode(choice: str, device: str) -> Any:
    """``no_grad`` or ``inference_mode``."""
    return {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[choice]()


def _choices(module: Any, batch: Any) -> list[str]:
    return ["no_grad", "inference_mode"]


MUTATION = Mutation("grad_mode", "no_grad or inference_mode around the forward", "around", _choices, grad_mode)
