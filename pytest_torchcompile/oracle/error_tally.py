"""Error tally: what the errors of one leaf come to, in units of rounding noise, gathered piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from pytest_torchcompile.oracle.estimate import finite_values, split_pieces
from pytest_torchcompile.oracle.leaf_limits import OFF, Limits
from pytest_torchcompile.oracle.measurement import read_numbers
from pytest_torchcompile.oracle.noise_levels import Projections
from pytest_torchcompile.oracle.scale import SEEN, Scale

__all__ = ["HALF", "ErrorTally", "Stretch", "split_leaf"]

HALF: Final = 0.5
"""An element that is off by so much of its expected value, which is above the noise, is lost: zero would be as near.

Of the elements that approximations of Inductor's (gelu, erf, expm1) put off, at most 47 % are lost: those next to 0."""
# What is left where values cancel exactly, as of a softmax over one value, is no larger than this share of the others.
_RESOLVED: Final = 2.0**-44


@dataclass(frozen=True)
class Stretch:
    """A piece of a leaf, flat."""

    exact: torch.Tensor
    """Finite: zero where the expected value is not."""
    is_finite: torch.Tensor
    noise: torch.Tensor
    jumps: torch.Tensor
    flushed: float
    """Errors up to this size are none, and values up to it may be zeros."""

    def error_of(self, compiled: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
        """How far compiled values are off; zero where one of the three is not finite, and for what may be flushed."""
        use = self.is_finite & torch.isfinite(compiled) & torch.isfinite(eager)
        error = compiled.double() - self.exact
        return error.where(use & (error.abs() > self.flushed), 0.0)

    def usual_ratio(self, ratio: torch.Tensor) -> torch.Tensor:
        """Errors over noise, for means over the leaf: there a jump as large as one that was seen counts one."""
        return torch.where(self.jumps, ratio / SEEN, ratio)


def split_leaf(scale: Scale, *others: torch.Tensor) -> Iterator[tuple[Stretch, tuple[torch.Tensor, ...]]]:
    """The leaf in pieces, with the same stretch of some other tensors."""
    flushed = _largest_flushed(scale.dtype)
    for value, spread, reach, mine, *rest in split_pieces(
        scale.centre, scale.spread, scale.reach, scale.eager, *others
    ):
        exact = finite_values(value.double())
        noise, jumps = scale.element_noise(exact, spread, reach, mine)
        yield Stretch(exact, torch.isfinite(value), noise, jumps, flushed), tuple(rest)


@dataclass
class ErrorTally:
    """What a leaf's errors come to, gathered piece by piece so that memory stays that of one piece."""

    limits: Limits
    systematic: Projections
    """Errors beside expected values, for the systematic offset."""
    largest: float
    """Of the expected values, infinities aside."""
    typical: float
    """Expected values below this size count as this size."""
    elements_seen: int = 0
    error_squares: float = 0.0
    """Of errors, each over its noise, summed."""
    zero_squares: float = 0.0
    """The same of a leaf of zeros in the place of the compiled one."""
    zero_peak: float = 0.0
    """The largest error over noise of that leaf of zeros."""
    peak: float = 0.0
    """The largest error over noise, and the place of its element."""
    worst: int = 0
    first_beyond: int | None = None
    """The place of the first element beyond the limit of ``peak``."""
    wrong: int = 0
    """Elements beyond the limit of ``rms``."""
    lost: int = 0
    """Those of them that zero would be as near to: see :data:`HALF`."""
    blind: int = 0
    """Elements of which noise hides all."""
    farthest: float = 0.0
    """The largest error in the leaf's own unit, and that of the elements which are off."""
    farthest_off: float = 0.0
    own_farthest: float = 0.0
    """Eager's largest error in the leaf's own unit."""

    def add(self, part: Stretch, compiled: torch.Tensor, eager: torch.Tensor) -> None:
        """Go on by the next piece."""
        error = part.error_of(compiled, eager)
        # An element that jumps is off by chance one way or the other: it says nothing of a systematic offset.
        self.systematic.add(error.where(~part.jumps, 0.0), part.exact)
        distance, size = error.abs(), part.exact.abs()
        ratio, signal = distance / part.noise, size.where(size > part.flushed, 0.0) / part.noise
        off = ratio > self.limits.rms
        # What float64 itself computes no digit of, beside the largest value, is zero: nothing of it can be lost.
        there = (signal > self.limits.rms) & (size > _RESOLVED * self.largest)
        # All in one step: a GPU is waited for once a piece, and not for each number.
        (error_squares, zero_squares, zero_peak, blind, wrong, lost, farthest, farthest_off, own_farthest, top,
         top_place) = read_numbers(
            part.usual_ratio(ratio).square().sum(),
            part.usual_ratio(signal).square().sum(),
            signal.amax(),
            (part.noise * self.limits.rms >= size.clamp(min=self.typical)).sum(),
            off.sum(),
            (off & there & (distance >= HALF * size)).sum(),
            distance.amax(),
            distance.where(ratio > OFF, 0.0).amax(),
            part.error_of(eager, compiled).abs().amax(),
            ratio.amax(),
            ratio.argmax(),
        )
        self.error_squares += error_squares
        self.zero_squares += zero_squares
        self.zero_peak = max(self.zero_peak, zero_peak)
        self.blind += int(blind)
        self.wrong += int(wrong)
        self.lost += int(lost)
        self.farthest = max(self.farthest, farthest)
        self.farthest_off = max(self.farthest_off, farthest_off)
        self.own_farthest = max(self.own_farthest, own_farthest)
        if top > self.peak:
            self.peak, self.worst = top, self.elements_seen + int(top_place)
        if self.first_beyond is None and top > self.limits.peak:
            self.first_beyond = self.elements_seen + int((ratio > self.limits.peak).nonzero()[0])
        self.elements_seen += compiled.numel()

    def zeros_would_pass(self, further: float = 1.0) -> bool:
        """Whether a leaf of zeros would pass for the compiled one too; ``further``: with so many times less noise."""
        most_rms, _, _ = self.limits.of(self.elements_seen)
        usual, peak = (self.zero_squares / self.elements_seen) ** 0.5, self.zero_peak
        return further * usual <= most_rms and further * peak <= self.limits.peak


def _largest_flushed(dtype: torch.dtype) -> float:
    """The size up to which an error is none: 1,024 times the smallest normal number, 1.2e-35.

    Kernels of a GPU make zeros of subnormals, and a batch norm multiplies what its input is off by with up to 316. None
    of float16 and the dtypes of 8 bits, whose subnormals are in daily use.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float64):
        return 0.0
    return 1024 * torch.finfo(dtype).tiny
