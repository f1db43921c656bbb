"""Calls that round otherwise than their operator does elsewhere (``operator_rounding.py``): not at all, or one way.

Models count in floating point: ``mask.cumsum(1) > 3``. A count is exact whatever the order of its terms. Noise in it
would flip a comparison that no rounding flips, and excuse whatever depends on that.

A scatter that keeps the largest value, and a norm that is one, hand on a number as it is. Their backward passes ask
which number that was, by ``==``. With noise it was none, and they divide by a count of zero.

Sums of terms that repeat, on a CPU, have rounding errors that point one way.
Where a float32 sum adds the same number again and again, each addition rounds by the same amount until the sum reaches
the next power of two. So the errors do not cancel, as those of differing terms do, and grow with the number of terms.
Code that adds in another order, as Inductor's loops do, is off by a thousand roundings there and right. Users meet it
with ``torch.zeros`` and ``torch.ones`` as inputs: images of one colour, and gradients of a mean.

The tape notes which calls sum up such terms (``sums_repeated``). In noise draws equal terms then get equal noise
(``disturb_alike``), and the mean that a normalisation takes off is off as a whole (``shift_means``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from pytest_torchcompile.oracle.operator_rounding import FLOAT32_UNIT, PRODUCTS, Operator, count_terms, unit_of
from pytest_torchcompile.state.value_leaves import is_plain

__all__ = [
    "adds_whole_numbers",
    "disturb_alike",
    "one_way_roundings",
    "picks_one",
    "shift_means",
    "sums_repeated",
    "takes_means_off",
]

_EXTREMES: Final = frozenset({"amax", "amin", "max", "min"})
_REDUCING_SCATTERS: Final = frozenset({"index_reduce", "scatter_reduce", "segment_reduce"})
_NORMS: Final = frozenset({"linalg_vector_norm", "norm"})
_ELEMENTWISE: Final = frozenset({"add", "floor_divide", "fmod", "mul", "remainder", "rsub", "square", "sub"})
_SCATTERS: Final = frozenset({"index_add", "scatter_add"})
_SUMS: Final = frozenset({"cumsum", "nansum", "sum"})
_EXACT_ON_WHOLE: Final = _ELEMENTWISE | _SCATTERS | _SUMS | PRODUCTS | {"dot"}

# Fewer terms have errors that the usual noise covers.
_FEWEST_TERMS: Final = 16
# Terms of a sum that are looked at, and sums.
_TERMS_SEEN, _SUMS_SEEN = 1024, 4
# Bits of a float32 that are dropped: numbers within a 2,048th of each other count as equal. Numbers that are
# round in binary lie in the middle of what is one.
_DROPPED_BITS, _MIDDLE = 12, 1 << 11
# Knuth's multiplicative hash of 32 bits (The Art of Computer Programming, volume 3, 6.4).
_SCATTER: Final = 2654435761
_FORWARD: Final = frozenset({"native_batch_norm", "native_group_norm"})
_BACKWARD: Final = frozenset({"native_batch_norm_backward", "native_group_norm_backward"})


# ------------------------------------------------------------------------------------------------------ nothing rounds
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
    tensors = [each for each in given if _has_fractions(each)]
    if not all(factor.is_integer() for factor in factors):
        return False
    if not all(_is_whole(tensor) for tensor in (result, *tensors)):
        return False
    factors += [float(tensor.abs().amax()) for tensor in tensors if tensor.numel()]
    largest = math.prod(max(1.0, factor) for factor in factors)
    return largest * _count_terms(about, args) * unit_of(result.dtype) <= 1


def _has_fractions(value: Any) -> bool:
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


# ------------------------------------------------------------------------------------------------------- one way
def takes_means_off(about: Operator) -> bool:
    """Whether it is a normalisation over many places of an image, or the backward pass of one."""
    return about.name in _FORWARD or about.name in _BACKWARD


def one_way_roundings(terms: int) -> float:
    """The largest relative error of a sum of ``terms`` equal terms, in unit roundoffs.

    One loop over all terms is off by a fifth of their number, in the root mean square. Inductor's loops on a CPU (torch
    2.13) were off by as much up to 1,024 terms, and by 15 times the root of their number at most for more. A number
    drawn evenly up to this bound has a root mean square of 0.58 times it.
    """
    return min(terms / 4, 32 * math.sqrt(terms))


def sums_repeated(about: Operator, args: Sequence[Any]) -> bool:
    """Whether this call of eager adds up numbers on a CPU of which most come again, in float32 or finer.

    Products of matrices and convolutions don't count: compiled code calls the library that eager calls. Sums of a
    narrower dtype are kept in float32, which holds them exactly for longer.
    """
    if not about.accumulates or about.name in PRODUCTS or "convolution" in about.name:
        return False
    terms = args[0] if args else None
    if not isinstance(terms, torch.Tensor) or not terms.is_floating_point() or not is_plain(terms):
        return False
    if terms.device.type != "cpu" or unit_of(terms.dtype) > FLOAT32_UNIT or terms.is_nested:
        return False
    if not terms.dim() or count_terms(about.name, args) < _FEWEST_TERMS:
        return False
    return _most_come_again(_sampled_sums(terms, _summed_axes(about, args, terms)))


def _summed_axes(about: Operator, args: Sequence[Any], terms: torch.Tensor) -> list[int]:
    """The axes over which numbers are added to one another."""
    every_axis = list(range(terms.dim()))
    if "norm" in about.name and "backward" in about.name:
        # Sums for the gradients of weight and bias: one for each channel.
        channels = terms.dim() - 1 if "layer" in about.name else min(1, terms.dim() - 1)
        return [axis for axis in every_axis if axis != channels]
    if about.name in _FORWARD:
        return [axis for axis in every_axis if axis != 1]
    if about.name == "native_layer_norm":
        return every_axis[-len(args[1]):]
    named = args[1] if len(args) > 1 else None
    if isinstance(named, int) and not isinstance(named, bool):
        named = [named]
    if isinstance(named, (list, tuple)) and named and all(isinstance(axis, int) for axis in named):
        return sorted({axis % terms.dim() for axis in named})
    return every_axis


def _sampled_sums(terms: torch.Tensor, summed: Sequence[int]) -> torch.Tensor:
    """Of a few sums a part of their terms, ``(sums, terms)``. Views until the end, so that little is copied."""
    kept = [axis for axis in range(terms.dim()) if axis not in summed]
    sample = terms.detach()
    for axes, wanted in ((kept, _SUMS_SEEN), (summed, _TERMS_SEEN)):
        each = max(1, math.ceil(wanted ** (1 / max(1, len(axes)))))
        for axis in axes:
            # Neighbours, from the middle: the edge of an image may be padding.
            first = max(0, (sample.shape[axis] - each) // 2)
            sample = sample.narrow(axis, first, min(each, sample.shape[axis]))
    terms_seen = math.prod(sample.shape[axis] for axis in summed)
    return sample.permute([*kept, *summed]).reshape(-1, terms_seen)


def _most_come_again(sums: torch.Tensor) -> bool:
    """Whether half of the terms of some sum equal another one of its own. Zeros add nothing and count as nothing."""
    if not sums.numel():
        return False
    ordered = sums.sort(dim=1).values
    again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != 0)
    present = (ordered != 0).sum(dim=1)
    return bool(((again.sum(dim=1) * 2 >= present) & (present >= _FEWEST_TERMS // 2)).any())


def disturb_alike(tensor: torch.Tensor, unit: float, pool: torch.Tensor, start: int) -> torch.Tensor:
    """A copy in which equal numbers have one relative error of up to ``unit``.

    ``pool`` has numbers in (-1, 1); which of them a number gets depends on its bits and on ``start``.
    """
    bits = tensor.float().view(torch.int32).to(torch.int64) + _MIDDLE
    places = ((bits >> _DROPPED_BITS) * _SCATTER + start) % pool.numel()
    noise = pool[places.reshape(-1)].reshape(tensor.shape)
    return torch.addcmul(tensor, tensor, noise, value=unit)


def shift_means(about: Operator, args: Sequence[Any], out: Sequence[Any],
                disturb: Callable[[torch.Tensor], None]) -> None:
    """Move the means that a normalisation takes off, and all that depends on them, in place.

    ``disturb`` gives each element of a tensor a relative error. Forward, ``out`` is the result, the means and the
    reciprocal deviations, and means of the input are taken off. Backward it begins with the gradient of the input, and
    means of the weighted gradient are. Where batch norm uses its running statistics, no mean is taken.
    """
    if about.name in _FORWARD:
        _shift_forward(about, args, out, disturb)
    elif out[0] is not None:
        _shift_backward(about, args, out[0], disturb)


def _shift_forward(about: Operator, args: Sequence[Any], out: Sequence[Any],
                   disturb: Callable[[torch.Tensor], None]) -> None:
    result, means, deviations = out[:3]
    of_batch = about.name == "native_batch_norm"
    if of_batch and not args[5]:
        return
    before = means.clone()
    disturb(means)
    shift = means - before
    moved = _over_places(shift * deviations, result)
    if args[1] is not None:
        moved = moved * _over_places(args[1], result)
    result.sub_(moved)
    if of_batch and args[3] is not None:
        running_mean, momentum = args[3], args[6]
        running_mean.add_(shift, alpha=momentum)


def _shift_backward(about: Operator, args: Sequence[Any], gradient: torch.Tensor,
                    disturb: Callable[[torch.Tensor], None]) -> None:
    of_batch = about.name == "native_batch_norm_backward"
    if of_batch and not args[7]:
        return
    weight, deviations = (args[2], args[6]) if of_batch else (args[4], args[3])
    weighted = args[0]
    if weight is not None:
        weighted = weighted * _over_places(weight, gradient)
    if of_batch:
        means = weighted.mean(dim=[axis for axis in range(weighted.dim()) if axis != 1])
    else:
        means = weighted.reshape(*deviations.shape, -1).mean(dim=2)
    shift = means.clone()
    disturb(shift)
    gradient.sub_(_over_places((shift - means) * deviations, gradient))


def _over_places(value: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Numbers of channels ``(C,)``, or of samples and groups ``(N, G)``, so that they broadcast over ``(N, C, *)``."""
    channels = image.shape[1]
    places = (1,) * (image.dim() - 2)
    if value.dim() == 1:
        return value.view(1, channels, *places)
    of_channels = value.repeat_interleave(channels // value.shape[1], dim=1)
    return of_channels.view(value.shape[0], channels, *places)
