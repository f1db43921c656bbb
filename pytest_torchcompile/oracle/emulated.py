"""Operators that torch has in no wide precision, written out in ones that it has, for the float64 run.

To add one: a function of the operator's own arguments, and its name in ``EMULATED``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

__all__ = ["EMULATED", "wide_version"]


def _grouped_mm(
    one: torch.Tensor, other: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """``aten::_grouped_mm`` (torch 2.8 to 2.15), the products of a mixture of experts: not in float64.

    ``offs`` are the ends of the groups, along the axis that only matrices (and no batch of them) have: rows of the
    first, columns of the second, or the axis that is summed over where both are matrices.
    """
    if offs is None:
        found = torch.bmm(one, other)
        return found if bias is None else found + bias
    ends = offs.tolist()
    groups = list(zip([0, *ends], ends, strict=False))
    if one.ndim == 2 and other.ndim == 2:
        found = torch.stack([one[:, start:end] @ other[start:end] for start, end in groups])
    elif one.ndim == 2:
        found = one.new_zeros(one.shape[0], other.shape[-1])
        for number, (start, end) in enumerate(groups):
            found[start:end] = one[start:end] @ other[number]
    else:
        found = one.new_zeros(one.shape[-2], other.shape[-1])
        for number, (start, end) in enumerate(groups):
            found[:, start:end] = one[number] @ other[:, start:end]
    return found if bias is None else found + bias


EMULATED: Final[dict[str, Callable[..., Any]]] = {"_grouped_mm": _grouped_mm}
"""By the name of the operator, without its namespace."""


def wide_version(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    """What to call in place of an operator in a wide run: most often the operator itself."""
    return EMULATED.get(name, operator)
