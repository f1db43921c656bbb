"""grad_mode: the forward runs without gradients, in inference mode, or with gradients where nobody wants them."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def grad_mode(choice: str, device: str) -> Any:
    """``no_grad``, ``inference_mode`` or ``enable_grad``, which a forward without a backward may be run in too."""
    return getattr(torch, choice)()


def _choices(module: Any, batch: Any) -> list[str]:
    return ["no_grad", "inference_mode", "enable_grad"]


MUTATION = Mutation("grad_mode", "no_grad, inference_mode or enable_grad around the forward", "around", _choices,
                    grad_mode)
