"""Leaf rows: leaves of about one length as the rows of a matrix, whose errors are summed up together.

In float32, once the differences are taken in float64: the numbers of
:class:`~pytest_torchcompile.oracle.error_tally.ErrorTally`, of many leaves in the steps of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from pytest_torchcompile.oracle.error_tally import HALF
from pytest_torchcompile.oracle.estimate import (
    Estimate,
    as_real,
    finite_values,
    length_class,
    piece_size,
    stack_rows,
    zeros_to_fill,
)
from pytest_torchcompile.oracle.judging import BIAS_FLOOR
from pytest_torchcompile.oracle.leaf_limits import Leaf, Limits
from pytest_torchcompile.oracle.measurement import Measurement, send
from pytest_torchcompile.oracle.noise_levels import (
    Levels,
    Noise,
    Projections,
    exponent_tables,
    levels_of_rows,
    root_sum_square,
    sample_rows,
)
from pytest_torchcompile.oracle.operator_rounding import smallest_noise, unit_of
from pytest_torchcompile.oracle.scale import SEEN

__all__ = ["LeafRow", "Sums", "measure_rows"]

# Up to the one in size, and down to the other in noise, float32 holds squares and their sums.
_LARGEST: Final = 2.0**50
_SMALLEST: Final = 2.0**-60


class LeafRow:
    """A leaf that is not measured yet: its two values, and what is expected."""

    def __init__(self, leaf: Leaf, eager: torch.Tensor, compiled: torch.Tensor, estimate: Estimate) -> None:
        """Take two tensors of one dtype, and an estimate of their shape."""
        self.leaf, self.estimate = leaf, estimate
        device = estimate.value.device
        self.eager, self.compiled = as_real(eager.detach()).to(device), as_real(compiled.detach()).to(device)

    @property
    def group(self) -> tuple[object, ...]:
        """What leaves have in common that are measured together."""
        return self.eager.dtype, self.eager.device, length_class(self.eager.numel()), bool(self.estimate.draws)


def measure_rows(rows: Sequence[LeafRow], limits: Limits) -> Measurement[list[Sums | None]]:
    """The sums of leaves of one group; None where float32 can't hold what is summed.

    ``limits`` say which elements count as wrong, and how far above its noise a value has to be.
    """
    # Here, once it begins: until then nothing is stacked.
    return (yield from _Rows(rows, limits).measure())


@dataclass(frozen=True)
class Sums:
    """Sums and largest values over the elements of a leaf."""

    count: int
    levels: Levels
    """The usual noise by magnitude."""
    weights: Levels
    """What the projections were made with."""
    draws: Noise
    """Of the draws, without eager's own error."""
    apart: float
    """Squares of eager's error."""
    size: float
    """Squares of the expected values."""
    across: float
    """Products of these two."""
    sizes: float
    """Of the expected values without their signs."""
    filled: float
    """How many of those are not zero."""
    own_squares: float
    """These four: of eager's error and of the values with their weights, as in ``Projections``."""
    own_along: float
    own_offset: float
    weighted_size: float
    along: float
    """These two: the same of the compiled error."""
    offset: float
    squares: float
    """Squares of the error over the noise of each element."""
    blind: float
    """These three: numbers of elements, as in ``ErrorTally``."""
    wrong: float
    lost: float
    peak: float
    """The largest error over its noise, and its place."""
    worst: float
    eager_there: float
    """These three: the values at that place."""
    compiled_there: float
    expected_there: float
    farthest: float
    farthest_apart: float
    largest: float
    reach: float
    """How far some draw moves some element."""
    has_signal: float
    """1 if some value is so far above its noise that a leaf of zeros would not pass for this one, else 0."""

    @property
    def noise(self) -> Noise:
        """Of eager's own error and of the draws."""
        own = Projections(self.weights)
        own.add_sums(self.own_squares, self.own_along, self.own_offset, self.weighted_size, self.count)
        noise = Noise()
        noise.add(own)
        noise.extend(self.draws)
        return noise

    def bias(self, limits: Limits) -> float:
        """How far the error points into one direction, in units of what the noise does."""
        error = Projections(self.weights)
        error.add_sums(0.0, self.along, self.offset, self.weighted_size, self.count)
        floor = 0.0
        if limits.bias:
            floor = BIAS_FLOOR / limits.bias
        return self.noise.excess(error, floor)


class _Rows:
    """Leaves of one class of lengths, dtype and device, measured together. Shorter ones end with zeros."""

    def __init__(self, rows: Sequence[LeafRow], limits: Limits) -> None:
        self._rows, self._limits = rows, limits
        estimates = [row.estimate for row in rows]
        self.expected = stack_rows([estimate.value for estimate in estimates])
        self.eager = stack_rows([row.eager for row in rows])
        self.compiled = stack_rows([row.compiled for row in rows])
        self.lengths = [row.eager.numel() for row in rows]
        self.filled_up = zeros_to_fill([row.eager for row in rows])
        self.spread = self.reach = None
        if estimates[0].draws:
            self.spread = stack_rows([estimate.spread for estimate in estimates if estimate.spread is not None])
            self.reach = stack_rows([estimate.reach for estimate in estimates if estimate.reach is not None])
        # Eager's own error is a draw too.
        self.draws = _column([estimate.draws + 1.0 for estimate in estimates])

    def _levels(self) -> Measurement[list[Levels]]:
        """The usual noise by magnitude, of each row."""
        exact = sample_rows(self.expected)
        noise = [finite_values(sample_rows(self.eager).double() - exact)]
        if self.spread is not None:
            noise.append(sample_rows(self.spread).double())
        per_draw = send(self.draws, exact.device).double() ** -0.5
        noise_of_sample = root_sum_square(*noise).mul_(per_draw)
        return (yield from levels_of_rows(finite_values(exact), noise_of_sample, self.filled_up))

    def measure(self) -> Measurement[list[Sums | None]]:
        """The sums of each row; None where float32 can't hold what is summed."""
        device = self.expected.device
        levels = yield from self._levels()
        weights = levels
        if self.spread is not None:
            weights = [row.estimate.levels for row in self._rows if row.estimate.levels is not None]
        tables, weight_tables = exponent_tables(levels), exponent_tables(weights)
        fit = (torch.minimum(tables.amin(1), weight_tables.amin(1)) >= _SMALLEST).tolist()
        relative, typical = _column([each.relative for each in weights]), _column([each.typical for each in levels])
        known = torch.cat([tables, weight_tables, relative, typical, self.draws, _column(self.lengths)], 1)
        widths = [tables.shape[1], weight_tables.shape[1], 1, 1, 1, 1]
        *known_of_rows, lengths = torch.split(send(known, device), widths, 1)
        work = _Workspace(*known_of_rows)
        tally = _Tally(self._limits, lengths if self.filled_up else None)
        size = max(1, piece_size(device) // len(self._rows))
        rows = [self.eager, self.compiled, self.expected]
        if self.spread is not None and self.reach is not None:
            rows += [self.spread, self.reach]
        for pieces in zip(*(torch.split(tensor, size, 1) for tensor in rows), strict=True):
            work.load(*pieces)
            tally.add(work, self.eager.dtype)
        if self.filled_up:
            # Where nothing is off, any place is the worst.
            tally.worst = torch.minimum(tally.worst, lengths.squeeze(1).long() - 1)
        there = tally.worst[:, None]
        for name, tensor in (("eager", self.eager), ("compiled", self.compiled), ("expected", self.expected)):
            tally.note(f"{name}_there", tensor.gather(1, there).squeeze(1))
        found: list[Sums | None] = []
        sums = yield from tally.read()
        for place, read in enumerate(sums):
            # NaN, infinity and what float32 can't hold are seen here.
            if not fit[place] or not all(map(math.isfinite, read.values())) or read["largest"] > _LARGEST:
                found.append(None)
                continue
            found.append(Sums(self.lengths[place], levels[place], weights[place],
                              self._rows[place].estimate.noise, **read))
        return found


def _column(numbers: Sequence[float]) -> torch.Tensor:
    """One number of each row, on the CPU whatever the default device is."""
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")[:, None]


class _Workspace:
    """Memory for a piece of all rows, in float32, that all pieces have in common.

    New memory for each step of each piece costs more than the steps: the allocator gives it back each time.
    """

    def __init__(self, tables: torch.Tensor, weight_tables: torch.Tensor, relative: torch.Tensor,
                 typical: torch.Tensor, draws: torch.Tensor) -> None:
        """Take what is known of each row.

        Args:
            tables: The level of each exponent of float32, (rows, 256).
            weight_tables: The same that the weights are made of.
            relative: The usual noise of a value over its size, (rows, 1), for the weights.
            typical: The usual size of a value, (rows, 1).
            draws: How many there are, eager's own error among them, (rows, 1).
        """
        self._tables, self._weight_tables, self._relative = tables.flatten(), weight_tables.flatten(), relative
        count, exponents = tables.shape
        # Where each row's levels begin, once the tables are flat.
        self._starts = torch.arange(count, dtype=torch.int32, device=tables.device)[:, None] * exponents
        self.typical, self.per_draw = typical, (draws + 1).reciprocal()
        self._memory: torch.Tensor | None = None
        self._wide = torch.empty(0)

    def load(self, eager: torch.Tensor, compiled: torch.Tensor, expected: torch.Tensor,
             spread: torch.Tensor | None = None, reach: torch.Tensor | None = None) -> None:
        """Take a piece: what is expected, how far eager and compiled are from it, and what draws have done."""
        if self._memory is None:
            # The first piece is the longest.
            self._memory = torch.empty(10, expected.numel(), device=expected.device)
            self._wide = torch.empty(expected.numel(), dtype=torch.float64, device=expected.device)
        rows = [row[: expected.numel()].view(expected.shape) for row in self._memory]
        self.expected, self.own, self.error, self.size, self.level, self.weights, self.spare, self.other = rows[:8]
        wide = self._wide[: expected.numel()].view(expected.shape)
        self.own.copy_(torch.sub(wide.copy_(eager), expected, out=wide))
        self.error.copy_(torch.sub(wide.copy_(compiled), expected, out=wide))
        torch.abs(self.expected.copy_(expected), out=self.size)
        places = torch.bitwise_right_shift(self.size.view(torch.int32), 23, out=self.spare.view(torch.int32))
        places += self._starts
        torch.index_select(self._tables, 0, places.flatten(), out=self.level.view(-1))
        # As ``Levels.weights``.
        torch.index_select(self._weight_tables, 0, places.flatten(), out=self.weights.view(-1))
        torch.mul(self.size, self._relative, out=self.spare)
        torch.maximum(self.weights, self.spare, out=self.weights).reciprocal_()
        self.spread = self.reach = None
        if spread is not None and reach is not None:
            self.spread, self.reach = rows[8].copy_(spread), rows[9].copy_(reach)


class _Tally:
    """Sums and largest values of all rows, gathered piece by piece. Nobody waits for a GPU before the end."""

    def __init__(self, limits: Limits, lengths: torch.Tensor | None) -> None:
        """``lengths``: of the rows, (rows, 1), where not all fill theirs."""
        self._limits, self._lengths = limits, lengths
        self._sums: dict[str, torch.Tensor] = {}
        self._largest: dict[str, torch.Tensor] = {}
        self._noted: dict[str, torch.Tensor] = {}
        self.worst = torch.empty(0)
        """The place of the largest error over its noise, (rows,)."""
        self._count = 0

    def add(self, piece: _Workspace, dtype: torch.dtype) -> None:
        """Take a piece in, and spoil it."""
        expected, own, error, size = piece.expected, piece.own, piece.error, piece.size
        spare, other, limits = piece.spare, piece.other, self._limits
        sums = {
            "apart": torch.mul(own, own, out=spare).sum(1),
            "size": torch.mul(expected, expected, out=spare).sum(1),
            "across": torch.mul(own, expected, out=spare).sum(1),
            "sizes": size.sum(1),
            "filled": (size > 0).sum(1),
        }
        farthest_apart = torch.sub(own, error, out=spare).abs_().amax(1)
        weighted = torch.mul(expected, piece.weights, out=spare)
        weighted_own = torch.mul(own, piece.weights, out=other)
        sums["own_offset"] = weighted_own.sum(1)
        sums["own_along"] = (weighted_own * weighted).sum(1)
        sums["own_squares"] = weighted_own.square_().sum(1)
        weighted_error = torch.mul(error, piece.weights, out=other)
        sums["offset"] = weighted_error.sum(1)
        sums["along"] = weighted_error.mul_(weighted).sum(1)
        sums["weighted_size"] = weighted.square_().sum(1)
        # As ``Scale.element_noise``, squared, in the memory of what it is made from: from here on ``own`` and
        # ``error`` are spoilt.
        squared_noise = own.square_().addcmul_(piece.level, piece.level)
        if piece.spread is not None:
            squared_noise.addcmul_(piece.spread, piece.spread)
        squared_noise.mul_(piece.per_draw)
        floor = torch.mul(size, unit_of(dtype), out=other).add_(smallest_noise(dtype)).square_()
        torch.maximum(squared_noise, floor, out=squared_noise)
        reach = torch.zeros_like(farthest_apart)
        if piece.reach is not None:
            reach = piece.reach.amax(1)
            torch.maximum(squared_noise, piece.reach.mul_(1 / SEEN).square_(), out=squared_noise)
        squared_size, squared_error = torch.square(size, out=spare), error.square_()
        squared_ratio = torch.div(squared_error, squared_noise, out=other)
        sums["squares"] = squared_ratio.sum(1)
        highest, places = squared_ratio.max(1)
        has_signal = (squared_size > squared_noise * limits.peak**2).any(1)
        bounds = squared_noise.mul_(limits.rms**2)
        off = squared_ratio > limits.rms**2
        lost = off & (squared_size > bounds) & (squared_error >= squared_size * HALF**2)
        sums["wrong"], sums["lost"] = off.sum(1), lost.sum(1)
        is_blind = bounds >= torch.maximum(size, piece.typical, out=size).square_()
        if self._lengths is not None:
            # What fills a row up has no error and no value, so that no other number counts it.
            is_blind &= torch.arange(self._count, self._count + size.shape[1], device=size.device) < self._lengths
        sums["blind"] = is_blind.sum(1)
        largest = {"peak": highest.sqrt(), "farthest": squared_error.amax(1).sqrt(), "farthest_apart": farthest_apart,
                   "largest": squared_size.amax(1).sqrt(), "reach": reach, "has_signal": has_signal.float()}
        self._take(sums, largest, places)
        self._count += expected.shape[1]

    def _take(self, sums: dict[str, torch.Tensor], largest: dict[str, torch.Tensor], places: torch.Tensor) -> None:
        if not self._count:
            self.worst, self._largest = places, largest
            self._sums = {name: value.double() for name, value in sums.items()}
            return
        self.worst = torch.where(largest["peak"] > self._largest["peak"], places + self._count, self.worst)
        for name, value in sums.items():
            self._sums[name] += value
        for name, value in largest.items():
            self._largest[name] = torch.maximum(self._largest[name], value)

    def note(self, name: str, values: torch.Tensor) -> None:
        """Read something else with the sums, (rows,)."""
        self._noted[name] = values

    def read(self) -> Measurement[list[dict[str, float]]]:
        """Of each row, by name."""
        vectors = {**self._sums, **self._largest, **self._noted, "worst": self.worst}
        rows = yield torch.stack([vector.double() for vector in vectors.values()], 1)
        return [dict(zip(vectors, row, strict=True)) for row in rows.tolist()]
