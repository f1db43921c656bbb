"""Calls in which nothing rounds, of operators that round elsewhere.

Models count in floating point: ``mask.cumsum(1) > 3``. A count is exact whatever the order of its terms. Noise in it
would flip a comparison that no rounding flips, and excuse whatever depends on that.

A scatter that keeps the largest value, and a norm that is one, hand on a number as it is. Their backward passes ask
which number that was, by ``==``. With noise it was none, and they divide by a count of zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from pytest_torchcompile.oracle.operator_rounding import PRODUCTS, Operator, count_terms, unit_of
from pytest_torchcompile.state.tensor_forms import distinct_numbers, is_plain

__all__ = ["adds_whole_numbers", "has_fractions", "picks_one"]

_EXTREMES: Final = frozenset({"amax", "amin", "max", "min"})
_REDUCING_SCATTERS: Final = frozenset({"index_reduce", "scatter_reduce", "segment_reduce"})
_NORMS: Final = frozenset({"linalg_vector_norm", "norm"})
_ELEMENTWISE: Final = frozenset({"add", "floor_divide", "fmod", "mul", "remainder", "rsub", "square", "sub"})
_SCATTERS: Final = frozenset({"index_add", "scatter_add"})
_SUMS: Final = frozenset({"cumsum", "nansum", "sum"})
_EXACT_ON_WHOLE: Final = _ELEMENTWISE | _SCATTERS | _SUMS | PRODUCTS | {"dot"}


def picks_one(about: Operator, args: Sequence[Any]) -> bool:
    """Whether this call hands on one of the numbers that it is given: the largest of several, or the smallest."""
    if about.name in _REDUCING_SCATTERS:
        return not _EXTREMES.isdisjoint(each for each in args if isinstance(each, str))
    if about.name in _NORMS:
        return any(isinstance(each, float) and math.isinf(each) for each in args)
    return False


def adds_whole_numbers(about: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.Tensor) -> bool:
    """Whether this call adds or multiplies whole numbers, so small that the result's dtype holds every sum.

    The number of terms times the largest of each factor bounds the sums: it holds for any order of summation, and for
    partial sums that are kept in the dtype of the result. Of a call that writes to an argument nobody knows any more
    what that held.
    """
    if about.name not in _EXACT_ON_WHOLE or about.writes or not _begins_whole(result):
        return False
    given = [*args, *kwargs.values()]
    factors = [abs(float(each)) for each in given if isinstance(each, (int, float))]
    # Of a sparse one what it does not store is zero.
    tensors = [distinct_numbers(each) for each in given if has_fractions(each)]
    if not all(factor.is_integer() for factor in factors):
        return False
    if not all(_is_whole(tensor) for tensor in (result, *tensors)):
        return False
    factors += [float(tensor.abs().amax()) for tensor in tensors if tensor.numel()]
    largest = math.prod(max(1.0, factor) for factor in factors)
    return largest * _count_terms(about, args) * unit_of(result.dtype) <= 1


def has_fractions(value: Any) -> bool:
    """Whether it is a tensor whose dtype holds more than whole numbers."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _begins_whole(tensor: torch.Tensor) -> bool:
    """Whether its first element is a whole number. Of most tensors it is not, and no more has to be looked at."""
    if tensor.is_complex() or tensor.is_meta or not is_plain(tensor) or not tensor.numel():
        return False
    return float(tensor[(0,) * tensor.dim()]).is_integer()


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_complex() and bool((tensor == tensor.trunc()).all())


def _count_terms(about: Operator, args: Sequence[Any]) -> int:
    """How many products one element adds up at most."""
    if about.name in _ELEMENTWISE:
        return 2
    if about.name in _SCATTERS:
        return 1 + max(each.numel() for each in args if isinstance(each, torch.Tensor))
    # One more: what a product is added to.
    return 1 + count_terms(about.name, args)
