"""Row noise: how large rounding is in the row and in the column of an element.

The gradient of a weight is a product of two matrices, whose rows and columns are of different sizes. So elements of one
magnitude do not share their noise there: that of an element is about what its row and its column usually have. Eager's
own error shows that without a draw, as a row has many elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from pytest_torchcompile.oracle.noise_levels import Levels, read_numbers
from pytest_torchcompile.oracle.operator_rounding import smallest_noise, unit_of

__all__ = ["worst_by_rows"]

# Elements that a row and a column have at least: then their mean squares are known well enough.
_LEAST = 16
# Elements looked at in one go, or one row.
_PIECE = 1 << 20


def worst_by_rows(
    eager: torch.Tensor, compiled: torch.Tensor, expected: torch.Tensor, levels: Levels
) -> tuple[float, int] | None:
    """The largest error over the noise of its element, and that element's place counted over all.

    Args:
        eager: Of any shape and floating dtype, without infinities and NaN, as the next two of its shape.
        compiled: Its errors are what is measured.
        expected: In float64.
        levels: The usual size of eager's errors by magnitude.

    The noise is the larger one of what ``levels`` and eager's own error there make of it, as in
    :meth:`Scale.element_noise`, and of the usual noise of row and column: the mean squares of eager's errors in these
    two, multiplied, over that of all. None for what is no matrix of 16 rows and columns, or where eager has no error.
    """
    shape = _even_matrix(expected.shape)
    if shape is None:
        return None
    matrices = [tensor.reshape(shape) for tensor in (eager, compiled, expected)]
    squares_of_rows, squares_of_columns = _mean_squares(matrices[0], matrices[2])
    usual = squares_of_columns.mean()
    if not float(usual) > 0:
        return None
    unit, tiny = unit_of(eager.dtype), smallest_noise(eager.dtype)
    found = []
    for mine, theirs, exact, rows in _split_rows(*matrices, squares_of_rows):
        by_level = (mine.double() - exact).square_().add_(levels.of(exact).square()).mul_(0.5)
        least = exact.abs().mul_(unit).add_(tiny).square_()
        by_rows = rows.outer(squares_of_columns).div_(usual)
        noise = torch.maximum(torch.maximum(by_level, least), by_rows)
        ratio = (theirs.double() - exact).square_().div_(noise)
        found += [ratio.amax(), ratio.argmax()]
    return _largest_of(read_numbers(*found), _rows_at_once(shape) * shape[1])


def _even_matrix(shape: torch.Size) -> tuple[int, int] | None:
    """Rows and columns, where the axes are parted as evenly as they can be; None where there are too few."""
    splits = [(prod(shape[:axis]), prod(shape[axis:])) for axis in range(1, len(shape))]
    most_even = max(splits, key=min, default=(1, 1))
    if min(most_even) < _LEAST:
        return None
    return most_even


def _mean_squares(eager: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of eager's errors in each row and in each column."""
    of_rows, of_columns = [], torch.zeros(expected.shape[1], dtype=torch.float64, device=expected.device)
    for mine, exact in _split_rows(eager, expected):
        squares = (mine.double() - exact).square_()
        of_rows.append(squares.mean(1))
        of_columns += squares.sum(0)
    return torch.cat(of_rows), of_columns / expected.shape[0]


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
