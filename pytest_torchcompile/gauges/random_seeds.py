"""Random seeds: what compiled code asks torch's generators for, where Inductor draws random numbers of its own.

A graph of Inductor's begins with one draw of whole numbers for each device, a seed for each of its random operators
(``RandomSeeds``, torch/_inductor/ir.py, torch 2.8 to 2.15). Its kernels make all numbers from these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["LEAST_SEED", "MOST_SEED", "can_note_seeds", "noted_seeds"]

LEAST_SEED, MOST_SEED = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
"""The range from which seeds are drawn; nobody else is likely to ask for this one."""
# What an operator's Python object calls (torch/_ops.py, ``OpOverload.__call__``, torch 2.8 to 2.15).
_CALLED = "_op"


def can_note_seeds() -> bool:
    """Whether this torch calls the operator as this file knows it."""
    return hasattr(torch.ops.aten.randint.low_out, _CALLED)


@contextlib.contextmanager
def noted_seeds() -> Iterator[list[torch.Tensor]]:
    """Note the seeds that generated Python code draws while the block runs, a tensor of one dimension for each draw.

    Code in C++, and CUDA graphs that are replayed, draw without Python: nothing is noted then.
    """
    noted: list[torch.Tensor] = []
    operator = torch.ops.aten.randint.low_out
    called = getattr(operator, _CALLED)
    # A mode that is active, as in the first call of a compiled graph, hands the operator on to itself.
    inside = False

    def note(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or args[:2] != (LEAST_SEED, MOST_SEED):
            return called(*args, **kwargs)
        inside = True
        try:
            seeds = called(*args, **kwargs)
        finally:
            inside = False
        noted.append(seeds.clone())
        return seeds

    setattr(operator, _CALLED, note)
    try:
        yield noted
    finally:
        setattr(operator, _CALLED, called)
