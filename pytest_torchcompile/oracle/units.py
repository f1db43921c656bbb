"""Unit roundoffs: the largest relative error of one rounding to a dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["FLOAT32_UNIT", "narrowest_unit", "program_unit", "unit_of", "widened"]

FLOAT32_UNIT = 2.0**-24
"""The unit of float32, in which kernels accumulate sums of float32, bfloat16 and float16."""


def unit_of(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next larger number: 2**-24 for float32, 2**-8 for bfloat16.

    A complex dtype has the unit of its parts.
    """
    return torch.finfo(dtype.to_real() if dtype.is_complex else dtype).eps / 2


def narrowest_unit(tensors: Iterable[torch.Tensor]) -> float | None:
    """The largest unit among floating and complex tensors; ``None`` where there is none."""
    units = [unit_of(t.dtype) for t in tensors if t.is_floating_point() or t.is_complex()]
    return max(units, default=None)


def program_unit(tensors: Iterable[torch.Tensor], seen: float | None) -> float:
    """The unit that a program works with: the largest of its tensors' and of what its operators were ``seen`` to round
    to; the default dtype's where nothing is known."""
    units = [unit for unit in (narrowest_unit(tensors), seen) if unit is not None]
    return max(units, default=unit_of(torch.get_default_dtype()))


def widened(dtype: torch.dtype, wide: torch.dtype) -> torch.dtype:
    """``wide`` for a floating dtype, its complex dtype for a complex one, others as they are."""
    if dtype.is_floating_point:
        return wide
    return wide.to_complex() if dtype.is_complex else dtype
