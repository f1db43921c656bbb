"""Ranks of one model decide alike: what one of them sees, all act upon, or the others would wait for it for ever."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Together"]

_SPREAD = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


class Together:
    """Whether a model is spread over ranks, and their common answers."""

    def __init__(self, module: nn.Module) -> None:
        parts = {kind.__name__ for part in module.modules() for kind in type(part).__mro__}
        self.spread = not parts.isdisjoint(_SPREAD) or any(hasattr(p, "device_mesh") for p in module.parameters())
        """Its calls are collective: whether one is made must not depend on what a single rank computed."""

    def any(self, mine: bool) -> bool:
        """Whether any rank says so. Collective where the model is spread, for nothing else."""
        if not self.spread or not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return mine
        gpus = torch.distributed.get_backend() == "nccl"
        votes = torch.tensor([int(mine)], device="cuda" if gpus else "cpu")
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX)
        return bool(votes.item())
