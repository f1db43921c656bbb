"""Row noise: how large rounding is in the row and in the column of an element.

The gradient of a weight is a product of two matrices, whose rows and columns are of different sizes. So elements of one
magnitude do not share their noise there: that of an element is about what its row and its column usually have. Eager's
own error shows that without a draw, as a row has many elements. It shows also where it is not so, as between experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

import torch

from pytest_torchcompile.oracle.measurement import Measurement, count_each
from pytest_torchcompile.oracle.noise_levels import Levels
from pytest_torchcompile.oracle.operator_rounding import smallest_noise, unit_of

__all__ = ["worst_by_rows"]

# Elements that a row and a column have at least: then their mean squares are known well enough.
_LEAST = 16
# Elements looked at in one go, or one row.
_PIECE = 1 << 20
# Groups of rows, each of half the noise of the one before.
_GROUPS: Final = 8
# Noise that rows and columns may tell, over what the magnitude tells: more is not believed.
_MOST: Final = 256.0
# Steps of a factor of two up to that one, and one below for elements of which rows and columns tell less.
_STEPS: Final = 9
# Elements that a step needs to be believed.
_FEW: Final = 64
# An error of eager's that is below this share of the noise told is small. Of a normal distribution 8 % are.
_SMALL: Final = 0.1
# In a step that is believed twice as many are small at most.
_MOST_SMALL: Final = 0.16


def worst_by_rows(
    eager: torch.Tensor, compiled: torch.Tensor, expected: torch.Tensor, levels: Levels
) -> Measurement[tuple[float, int] | None]:
    """The largest error over the noise of its element, and that element's place counted over all.

    Args:
        eager: Of any shape and floating dtype, without infinities and NaN, as the next two of its shape.
        compiled: Its errors are what is measured.
        expected: In float64.
        levels: The usual size of eager's errors by magnitude.

    The noise is what ``levels`` and eager's own error there make of it, as in :meth:`Scale.element_noise`. It is that
    of row and column where this is larger: the mean squares of eager's errors in these two, multiplied, over that of
    all. The column's is that of rows with about as much noise. This is believed up to 256 times the level, and where
    eager's errors are as large as it says. None for what is no matrix of 16 rows and columns, or where eager has no
    error.
    """
    shape = _even_matrix(expected.shape)
    if shape is None:
        return None
    eager, compiled, expected = (tensor.reshape(shape) for tensor in (eager, compiled, expected))
    loudest, *found = yield _ratios_by_rows(eager, compiled, expected, levels)
    if not loudest > 0:
        return None
    return _largest_of([float(number) for number in found], _rows_at_once(shape) * shape[1])


def _ratios_by_rows(
    eager: torch.Tensor, compiled: torch.Tensor, expected: torch.Tensor, levels: Levels
) -> torch.Tensor:
    """Eager's largest mean square of a row, and of each piece the largest squared error over noise and its place."""
    squares_of_rows = _mean_squares_of_rows(eager, expected)
    groups = _group_rows(squares_of_rows)
    noise = _Noise(_column_profiles(eager, expected, groups), levels, unit_of(eager.dtype), smallest_noise(eager.dtype))
    believed = _believed_steps(eager, expected, squares_of_rows, groups, noise)
    found = [squares_of_rows.amax()]
    for mine, theirs, exact, rows, group in _split_rows(eager, compiled, expected, squares_of_rows, groups):
        by_rows, step = noise.of(exact, rows, group)
        # As ``Scale.element_noise``: eager's error there and the level are two draws.
        by_level = _squared_errors(mine, exact).add_(levels.of(exact).square()).mul_(0.5)
        squared_noise = torch.maximum(by_level, noise.least(exact))
        squared_noise = torch.maximum(squared_noise, by_rows.masked_fill_(~believed[step], 0.0))
        ratio = _squared_errors(theirs, exact).div_(squared_noise)
        found += [ratio.amax(), ratio.argmax().double()]
    return torch.stack(found)


@dataclass(frozen=True)
class _Noise:
    """Squares of the noise of some rows."""

    profiles: torch.Tensor
    """For each group of rows, the mean square of eager's errors in each column, over that of the group."""
    levels: Levels
    unit: float
    tiny: float

    def least(self, exact: torch.Tensor) -> torch.Tensor:
        """One rounding of the result."""
        return exact.abs().mul_(self.unit).add_(self.tiny).square_()

    def of(self, exact: torch.Tensor, rows: torch.Tensor, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """By row and column, and in which step that is above what the magnitude tells; 0 where it is not."""
        by_level = torch.maximum(self.levels.of(exact).square(), self.least(exact))
        by_rows = torch.minimum(self.profiles[group].mul_(rows[:, None]), by_level * _MOST**2)
        # Both are squares: of their quotient a factor of four is one of two in noise.
        factors_of_two = (by_rows / by_level).log2_().mul_(0.5).floor_()
        return by_rows, factors_of_two.add_(1).clamp_(0, _STEPS - 1).long()


def _believed_steps(
    eager: torch.Tensor, expected: torch.Tensor, squares_of_rows: torch.Tensor, groups: torch.Tensor, noise: _Noise
) -> torch.Tensor:
    """For each step, whether eager's errors in it are as large as rows and columns say."""
    counts = torch.zeros(_STEPS, dtype=torch.int64, device=expected.device)
    small = torch.zeros_like(counts)
    for mine, exact, rows, group in _split_rows(eager, expected, squares_of_rows, groups):
        by_rows, step = noise.of(exact, rows, group)
        is_small = _squared_errors(mine, exact) < by_rows * _SMALL**2
        counts += count_each(step, _STEPS)
        # All others are counted behind the last step.
        small += count_each(step.masked_fill(~is_small, _STEPS), _STEPS + 1)[:_STEPS]
    return (counts >= _FEW) & (small <= _MOST_SMALL * counts)


def _even_matrix(shape: torch.Size) -> tuple[int, int] | None:
    """Rows and columns, where the axes are parted as evenly as they can be; None where there are too few."""
    splits = [(prod(shape[:axis]), prod(shape[axis:])) for axis in range(1, len(shape))]
    most_even = max(splits, key=min, default=(1, 1))
    if min(most_even) < _LEAST:
        return None
    return most_even


def _mean_squares_of_rows(eager: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of eager's errors."""
    return torch.cat([_squared_errors(mine, exact).mean(1) for mine, exact in _split_rows(eager, expected)])


def _squared_errors(values: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """In float64."""
    return (values.double() - exact).square_()


def _group_rows(squares: torch.Tensor) -> torch.Tensor:
    """The number of each row's group: rows of about one noise, which share a profile of columns.

    Of an embedding that is the last layer too, the rows of the words that occur have other columns than the rest. A
    group of few rows tells no profile: such rows get the number ``_GROUPS``, of all rows together.
    """
    # Rows without an error are infinitely many halves below the loudest, and so in the last group.
    halves = (squares / squares.amax()).nan_to_num_(0.0).log2_().mul_(-0.5).floor_()
    groups = halves.clamp_(0, _GROUPS - 1).long()
    counts = count_each(groups, _GROUPS)
    return groups.masked_fill_(counts[groups] < _LEAST, _GROUPS)


def _column_profiles(eager: torch.Tensor, expected: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Mean squares of eager's errors in each column over that of the group, for each group and, last, for all rows."""
    sums = torch.zeros(_GROUPS + 1, expected.shape[1], dtype=torch.float64, device=expected.device)
    for mine, exact, group in _split_rows(eager, expected, groups):
        sums.index_add_(0, group, _squared_errors(mine, exact))
    sums[-1] = sums.sum(0)
    # A group without rows or errors has no mean; nobody asks for its profile, or it is zero.
    return sums.div_(sums.mean(1, keepdim=True)).nan_to_num_(0.0)


def _split_rows(first: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same rows of all, so many at a time that memory stays bounded."""
    size = _rows_at_once(first.shape)
    yield from zip(*(torch.split(tensor, size) for tensor in (first, *others)), strict=True)


def _rows_at_once(shape: tuple[int, ...]) -> int:
    return max(1, _PIECE // shape[1])


def _largest_of(found: list[float], step: int) -> tuple[float, int]:
    """The root of the largest of some numbers, which each come before their place in a piece of ``step`` elements."""
    squares, places = found[::2], found[1::2]
    piece = max(range(len(squares)), key=squares.__getitem__)
    return squares[piece] ** 0.5, piece * step + int(places[piece])
