"""Settling: leaves that eager's own error shows to be right, which nearly all leaves of a right program are.

The numbers of :mod:`~pytest_torchcompile.oracle.judging`, made in one go over the elements, and in float32 once the
differences are taken in float64. Whatever leaves a doubt is judged there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from pytest_torchcompile.oracle.error_tally import HALF
from pytest_torchcompile.oracle.estimate import (
    Estimate,
    as_real,
    levels_from_eager,
    small_to_cpu,
    split_pieces,
)
from pytest_torchcompile.oracle.expected import WIDER, Reference
from pytest_torchcompile.oracle.judging import BIAS_FLOOR, grain_of, with_values
from pytest_torchcompile.oracle.leaf_limits import Leaf, Limits, problem
from pytest_torchcompile.oracle.noise_levels import Levels, Noise, Projections, read_numbers
from pytest_torchcompile.oracle.operator_rounding import smallest_noise, unit_of
from pytest_torchcompile.oracle.row_noise import worst_by_rows

__all__ = ["settle_by_eager"]

# Dtypes whose differences float32 holds.
_NARROW = frozenset({torch.float32, torch.bfloat16, torch.float16})
_SMALL = 1 << 14
# Up to the one in size, and down to the other in noise, float32 holds squares and their sums.
_LARGEST, _SMALLEST = 2.0**50, 2.0**-60


def settle_by_eager(
    leaf: Leaf, eager: torch.Tensor, compiled: torch.Tensor, reference: Reference, limits: Limits, strict: Limits
) -> Leaf | None:
    """Measure a leaf in units of eager's own error.

    ``strict`` are the limits that it has to hold, ``limits`` those that say which elements count as wrong. None where
    any doubt is left: it is over a limit, undecided, not finite, too large or small for float32, or eager is so far
    from what is expected that its error is no measure.
    """
    estimate = reference.estimates.get(leaf.name)
    if estimate is None or estimate.offered or estimate.brink is not None or reference.kind not in WIDER:
        return None
    e, c = as_real(small_to_cpu(eager.detach())), as_real(small_to_cpu(compiled.detach()))
    if e.dtype not in _NARROW or not estimate.continuous or estimate.value.shape != e.shape:
        return None
    # For a small leaf this costs less than the rest; a large one is seen once, below.
    if e.numel() <= _SMALL and not estimate.is_near(e):
        return None
    levels = levels_from_eager(e, estimate)
    sums = _sum_pieces(e, c, estimate, levels, limits)
    if sums is None or not estimate.is_so_near(sums.apart, sums.size, e.dtype) or not sums.has_signal:
        return None
    measured = replace(leaf, rms=(sums.squares / sums.count) ** 0.5, bias=_bias_of(sums, levels, limits),
                       peak=sums.peak, grain=_grain_of(sums, e.dtype), wrong=sums.wrong / sums.count,
                       blind=sums.blind, against=reference.kind, why=reference.why, draws=1)
    place = sums.worst
    if sums.peak > strict.peak:
        found = None
        # Of outputs nobody knows that they are products.
        if leaf.kind == "gradient":
            found = worst_by_rows(e, c, estimate.value, levels)
        if found is None or found[0] > strict.peak:
            return None
        measured, place = replace(measured, peak=found[0]), found[1]
    if not measured.decided or problem(measured, strict) is not None:
        return None
    return with_values(measured, place, e, c, estimate.value)


def _sum_pieces(e: torch.Tensor, c: torch.Tensor, estimate: Estimate, levels: Levels, limits: Limits) -> _Sums | None:
    """All sums over eager's leaf ``e`` and the compiled ``c``; None where float32 can't hold what is summed."""
    by_exponent = levels.by_exponent()
    if by_exponent is None or float(by_exponent.amin()) < _SMALLEST:
        return None
    by_exponent = by_exponent.to(e.device)
    unit, tiny = unit_of(e.dtype), smallest_noise(e.dtype)
    sums = _Sums()
    workspace: _Workspace | None = None
    for mine, found, expected in split_pieces(e, c, estimate.value):
        # The first piece is the longest.
        workspace = workspace or _Workspace(expected.numel(), expected.device)
        workspace.load(mine, found, expected, by_exponent, levels.relative)
        sums.add(workspace, unit, tiny, limits, levels.typical)
        # NaN, infinity and what float32 can't hold are seen here.
        if not sums.finite or sums.largest > _LARGEST:
            return None
    return sums


def _bias_of(sums: _Sums, levels: Levels, limits: Limits) -> float:
    """How far the error points into one direction, in units of what eager's own error does."""
    own, error = Projections(levels), Projections(levels)
    own.add_sums(sums.own_squares, sums.own_along, sums.own_offset, sums.weighted_size, sums.count)
    error.add_sums(0.0, sums.along, sums.offset, sums.weighted_size, sums.count)
    noise = Noise()
    noise.add(own)
    floor = 0.0
    if limits.bias:
        floor = BIAS_FLOOR / limits.bias
    return noise.excess(error, floor)


def _grain_of(sums: _Sums, dtype: torch.dtype) -> float | None:
    """The largest error in units of the leaf's largest value; None if most of what is wrong has lost its value."""
    if sums.lost > sums.wrong - sums.lost:
        return None
    return grain_of(sums.farthest, sums.largest, dtype)


class _Workspace:
    """Memory for a piece of a leaf, in float32, that all pieces have in common.

    New memory for each step of each piece costs more than the steps: the allocator gives it back each time.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self._wide = torch.empty(length, dtype=torch.float64, device=device)
        self._rows = torch.empty(8, length, dtype=torch.float32, device=device)

    def load(self, eager: torch.Tensor, compiled: torch.Tensor, expected: torch.Tensor, by_exponent: torch.Tensor,
             relative: float) -> None:
        """Take a piece: what is expected, and how far eager and compiled are from it."""
        rows = self._rows[:, :expected.numel()].unbind()
        wide = self._wide[:expected.numel()]
        self.expected, self.own, self.error, self.size, self.level, self.weights, self.spare, self.other = rows
        self.own.copy_(wide.copy_(eager).sub_(expected))
        self.error.copy_(wide.copy_(compiled).sub_(expected))
        torch.abs(self.expected.copy_(expected), out=self.size)
        exponents = torch.bitwise_right_shift(self.size.view(torch.int32), 23, out=self.spare.view(torch.int32))
        torch.index_select(by_exponent, 0, exponents, out=self.level)
        # As ``Levels.weights``.
        torch.mul(self.size, relative, out=self.weights)
        torch.maximum(self.weights, self.level, out=self.weights).reciprocal_()


@dataclass
class _Sums:
    """Sums and largest values over the pieces of a leaf."""

    count: int = 0
    apart: float = 0.0
    """Squares of eager's error."""
    size: float = 0.0
    """Squares of the expected values."""
    own_squares: float = 0.0
    """These four: of eager's error and of the values with their weights, as in ``Projections``."""
    own_along: float = 0.0
    own_offset: float = 0.0
    weighted_size: float = 0.0
    along: float = 0.0
    offset: float = 0.0
    squares: float = 0.0
    """Squares of the error over the noise of each element."""
    peak: float = 0.0
    worst: int = 0
    farthest: float = 0.0
    largest: float = 0.0
    blind: int = 0
    wrong: int = 0
    lost: int = 0
    has_signal: bool = False
    """Whether some value is so far above its noise that a leaf of zeros would not pass for this one."""
    finite: bool = True

    def add(self, piece: _Workspace, unit: float, tiny: float, limits: Limits, typical: float) -> None:
        """Take a piece in, and spoil it; ``unit`` and ``tiny`` bound the noise of an element from below."""
        expected, own, error, size, level = piece.expected, piece.own, piece.error, piece.size, piece.level
        found = [own.dot(own), expected.dot(expected)]
        weighted = torch.mul(expected, piece.weights, out=piece.spare)
        weighted_own = torch.mul(own, piece.weights, out=piece.other)
        found += [weighted_own.dot(weighted_own), weighted_own.dot(weighted), weighted_own.sum()]
        found += [weighted.dot(weighted)]
        weighted_error = torch.mul(error, piece.weights, out=piece.other)
        found += [weighted_error.dot(weighted), weighted_error.sum()]
        # As ``Scale.element_noise``: eager's error and the level are two draws. All of it is squared, in the memory
        # of what it is made from: from here on ``own`` and ``error`` are spoilt.
        squared_noise = own.square_().addcmul_(level, level).mul_(0.5)
        floor = torch.mul(size, unit, out=piece.other).add_(tiny).square_()
        torch.maximum(squared_noise, floor, out=squared_noise)
        squared_size, squared_error = torch.square(size, out=piece.spare), error.square_()
        squared_ratio = torch.div(squared_error, squared_noise, out=piece.other)
        found += [squared_ratio.sum(), squared_ratio.amax(), squared_error.amax(), squared_size.amax()]
        has_signal = (squared_size > squared_noise * limits.peak**2).any()
        bounds = squared_noise.mul_(limits.rms**2)
        off = squared_ratio > limits.rms**2
        lost = off & (squared_size > bounds) & (squared_error >= squared_size * HALF**2)
        blind = bounds >= size.clamp_(min=typical).square_()
        # All in one step: a GPU is waited for once a piece, and not for each number.
        found += [has_signal, blind.sum(), off.sum(), lost.sum(), squared_ratio.argmax()]
        self._add_found(read_numbers(*found))
        self.count += expected.numel()

    def _add_found(self, found: list[float]) -> None:
        self.finite = self.finite and all(map(math.isfinite, found))
        if not self.finite:
            return
        # In the order in which ``add`` finds them.
        apart, values, own_squares, own_along, own_offset, weights, along, offset, squares, *rest = found
        highest, farthest, largest, has_signal, blind, wrong, lost, place = rest
        self.apart += apart
        self.size += values
        self.own_squares += own_squares
        self.own_along += own_along
        self.own_offset += own_offset
        self.weighted_size += weights
        self.along += along
        self.offset += offset
        self.squares += squares
        self.has_signal = self.has_signal or bool(has_signal)
        self.blind += int(blind)
        self.wrong += int(wrong)
        self.lost += int(lost)
        if highest**0.5 > self.peak:
            self.peak, self.worst = highest**0.5, self.count + int(place)
        self.farthest, self.largest = max(self.farthest, farthest**0.5), max(self.largest, largest**0.5)
