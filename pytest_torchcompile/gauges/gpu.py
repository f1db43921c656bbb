"""Is the GPU still usable from this process? After an illegal access or a failed device assertion it is not."""

from __future__ import annotations

from typing import Final

__all__ = ["out_of_memory", "release_memory", "sticky_error"]

_MUCH: Final = 1 << 30
"""Bytes that something of the cell still holds, likely in a cycle."""


def sticky_error(*, wait: bool = True) -> str:
    """Why nothing more can run on this process' GPUs, in CUDA's words; empty if all is well, or none is in use.

    Such errors are sticky: CUDA repeats them at every later call of the process, whatever it is. So the process waits
    for everything that it has started, and then allocates and computes something of its own. Without ``wait`` it only
    asks: a collective that another rank never joins would never end.
    """
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    try:
        if not wait:
            torch.cuda.current_stream().query()
            return ""
        torch.cuda.synchronize()
        if int(torch.ones(2, device="cuda").sum().item()) != 2:
            return "the GPU adds 1 and 1 wrongly"
    except Exception as error:
        # What the cell has left is collected with it; the memory itself works.
        if out_of_memory(error):
            return ""
        # The lines after the first are the same for every error: that it may be of an earlier call, and how to find it.
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    return ""


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the GPU has no memory left, which is no sticky error."""
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def release_memory() -> None:
    """Give back cached memory of the GPUs in use, so that the next cell, or another process, can have it."""
    import gc

    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Collecting takes half a second, so it is done only where it is likely to help.
        if torch.cuda.memory_allocated() > _MUCH:
            gc.collect()
        torch.cuda.empty_cache()
