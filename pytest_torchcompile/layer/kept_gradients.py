"""The gradients that a run leaves on a module's parameters, for an optimiser's step after it."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Gradients"]


class Gradients:
    """Entered around a run: holds on to the gradients that it leaves, which the record of it drops."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> Gradients:
        return self

    def __exit__(self, *exc: object) -> None:
        self.found = [(p, p.grad) for p in self.module.parameters() if p.grad is not None]
