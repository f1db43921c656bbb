"""Batches as the tokeniser makes them, and the loss of training."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def tokens(B: int, S: int) -> dict[str, Tensor]:
    """One batch, as keyword arguments of the model."""
    return {"tokens": torch.randint(0, 128, (B, S))}


def next_token_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Each place has to foretell the token after it."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())
