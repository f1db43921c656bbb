"""Calls that activation checkpointing will run again: forward and recompute must be the same code.

A recompute that runs eagerly where the forward ran compiled saves other tensors and draws other random numbers, and may
give wrong gradients without an error. So it is counted which compiled calls may yet be recomputed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Outstanding", "in_backward", "need_gradient", "saving"]

saving = torch._C._autograd._top_saved_tensors_default_hooks
"""``saving(True)``: the hooks for saved tensors in force, or None. ``torch.utils.checkpoint`` puts some around the
forward and the recompute of its non-reentrant variant (torch 2.8 to 2.15)."""


def in_backward() -> bool:
    """Is this thread inside a backward pass? (``torch._C._current_graph_task_id``, torch 2.8 to 2.15)."""
    return torch._C._current_graph_task_id() != -1


class _OwnCall(threading.local):
    recomputable = False
    ran_before = 0


class Outstanding:
    """Compiled calls of one model that may yet be recomputed."""

    def __init__(self) -> None:
        self.count = 0
        self.mine = _OwnCall()
        """About the call that this thread is in."""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], ran: int) -> Iterator[None]:
        """Around a call; ``ran``: how many compiled graphs have run in this process."""
        recompute, mine = in_backward(), self.mine
        recomputable = not recompute and _will_be_recomputed(args, kwargs)
        with self._lock:
            if recomputable:
                self.count += 1
            elif recompute and self.count:
                # It is the recompute of one of them.
                self.count -= 1
        # Calls of one model may nest.
        outer = mine.recomputable, mine.ran_before
        mine.recomputable, mine.ran_before = recomputable, ran
        try:
            yield
        finally:
            mine.recomputable, mine.ran_before = outer

    def why_not_eager(self, ran: int) -> str:
        """Why this thread's call must not go on eagerly, or ''; ``ran`` as for :meth:`call`."""
        if in_backward():
            return ("it was called in a backward pass, where activation checkpointing recomputes a forward pass that "
                    "ran compiled")
        others = self.count - self.mine.recomputable
        if others:
            return (f"{others} earlier call(s) ran compiled under activation checkpointing (or other hooks for saved "
                    "tensors) and may yet be recomputed")
        if self.mine.recomputable and ran > self.mine.ran_before:
            return "part of this call has run compiled already, and activation checkpointing will recompute all of it"
        return ""


def _will_be_recomputed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Hooks for saved tensors are in force, or gradients are off for tensors that need them (the reentrant variant)."""
    return saving(True) is not None or (not torch.is_grad_enabled() and need_gradient(args, kwargs))


def need_gradient(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor among the arguments requires a gradient. Asked at every call without gradients: kept plain."""
    for value in args:
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return any(isinstance(value, Tensor) and value.requires_grad for value in kwargs.values()) if kwargs else False
