"""Sources: generators of random numbers that a model holds itself, and their states."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["Source", "source_of"]


class Source(NamedTuple):
    """A generator's state, and how it is read and written."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    state: Any

    def changed(self) -> bool:
        """Whether something was drawn since."""
        now = self.get()
        if isinstance(now, torch.Tensor):
            return not torch.equal(now, self.state)
        return pickle.dumps(now) != pickle.dumps(self.state)

    def restore(self) -> None:
        """Go back to the state."""
        self.set(self.state)


def source_of(value: Any) -> Source | None:
    """The present state of a generator of torch, Python or NumPy; None for anything else."""
    found = _access(value)
    return None if found is None else Source(*found, found[0]())


def _access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(value, numpy.RandomState):
        return value.get_state, value.set_state
    if numpy is not None and isinstance(value, numpy.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None
