"""Transcript memory: the memory that tensors of a run lie in, by which a transcript tells which are views of others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Memory", "OuterTensor", "bytes_of", "memory_of"]


@dataclass
class Memory:
    """One piece of memory that tensors of the run lie in."""

    owner: int
    """The number of the first tensor seen in it."""
    outer: bool
    """Whether it was there before the run."""
    dtype: torch.dtype
    """Of that tensor."""
    moved: bool = False
    """Whether rounding moves a number in it."""
    before: torch.Tensor | None = None
    """Its bytes from before the run, if the run writes to it."""
    shared: bool = False
    """Whether Python has it as an array, so that what is written to it later is seen there."""


@dataclass
class OuterTensor:
    """A tensor from before the run, as it was when it was first seen."""

    tensor: torch.Tensor
    memory: Memory
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def again(self, fresh: dict[int, torch.Tensor]) -> torch.Tensor:
        """It, or the same view of a copy of its memory, which ``fresh`` has for all tensors of a run."""
        memory = self.memory
        if memory.before is None:
            return self.tensor.detach().as_strided(self.shape, self.strides, self.offset)
        if memory.owner not in fresh:
            fresh[memory.owner] = memory.before.clone()
        empty = torch.empty(0, dtype=self.tensor.dtype, device=self.tensor.device)
        return empty.set_(fresh[memory.owner].untyped_storage(), self.offset, self.shape, self.strides)


def memory_of(tensor: torch.Tensor) -> StorageWeakRef:
    """A reference by which memory is told from other memory, also after it was freed.

    ``torch.multiprocessing.reductions.StorageWeakRef``: torch 2.8 to 2.15.
    """
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor lies in."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
