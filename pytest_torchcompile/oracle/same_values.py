"""Same values: many pairs of tensors at once, bit by bit or but for rounding. A GPU is waited for once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pytest_torchcompile.oracle.estimate import as_real
from pytest_torchcompile.oracle.measurement import read_numbers
from pytest_torchcompile.oracle.operator_rounding import unit_of
from pytest_torchcompile.oracle.scale import EAGER_ONLY_UNITS
from pytest_torchcompile.state.tensor_forms import is_plain, same_bits

__all__ = ["names_of_differing", "same_bits_on_gpu", "same_but_for_rounding"]


def same_bits_on_gpu(pairs: Iterable[tuple[str, Any, Any]]) -> dict[str, bool]:
    """By name, whether two tensors on a GPU are equal as for ``same_bits``; nothing of all else.

    On a CPU each pair by itself is quicker: the first difference ends it.
    """
    names, differing = [], []
    for name, one, other in pairs:
        if _is_alike(one, other) and _is_on_gpu(one):
            names.append(name)
            differing.append(_differ(one, other))
    return {name: not is_other for name, is_other in zip(names, read_numbers(*differing), strict=True)}


def names_of_differing(pairs: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> set[str]:
    """Names of the pairs that are not equal as for ``same_bits``. No pair is held once the next one is asked for."""
    differing: set[str] = set()
    unread: dict[str, torch.Tensor] = {}
    for name, one, other in pairs:
        if _is_alike(one, other) and _is_on_gpu(one):
            unread[name] = _differ(one, other)
        elif not same_bits(one, other):
            differing.add(name)
    read = read_numbers(*unread.values())
    return differing | {name for name, is_other in zip(unread, read, strict=True) if is_other}


def same_but_for_rounding(runs: Iterable[tuple[str, Any, Any, float]]) -> set[str]:
    """Names of floating tensors that differ in no element by more than 16 roundings.

    Each comes with the typical size of its values: of a smaller element these are roundings of that size. Nothing is
    said of tensors of two shapes or dtypes, and of NaN.
    """
    names, farther = [], []
    for name, one, other, typical in runs:
        if not _is_alike(one, other):
            continue
        first, second = as_real(one.detach()).float(), as_real(other.detach()).float()
        allowed = first.abs().clamp_(min=typical).mul_(EAGER_ONLY_UNITS * unit_of(one.dtype))
        names.append(name)
        # Not (a > b): NaN is not smaller.
        farther.append(~((second - first).abs_() <= allowed).all())
    return {name for name, is_far in zip(names, read_numbers(*farther), strict=True) if not is_far}


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether two tensors that are alike differ, as for ``same_bits``; not read yet."""
    is_other = one != other
    if one.is_floating_point() or one.is_complex():
        is_other &= ~(one.isnan() & other.isnan())
    return is_other.any()


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _is_alike(one: Any, other: Any) -> bool:
    """Whether both are plain tensors of one shape, dtype and device, and torch has arithmetic of theirs."""
    for tensor in (one, other):
        if not isinstance(tensor, torch.Tensor) or not is_plain(tensor) or tensor.is_quantized or tensor.is_nested:
            return False
    if one.is_floating_point() and one.dtype.itemsize == 1:
        return False
    return bool(one.shape == other.shape and one.dtype == other.dtype and one.device == other.device)
