"""How noise is spread over a leaf: the usual noise of an element by its magnitude, and how large an error is as a
whole and how much of it points one way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from pytest_torchcompile.oracle.measurement import Measurement, count_each, measure_alone, read_numbers, send

__all__ = ["SAMPLE", "Levels", "Noise", "Projections", "exponent_tables", "levels_of", "levels_of_rows",
           "root_sum_square", "sample_elements", "sample_rows", "weights_of_rows"]

# Bins of magnitude, each a factor of four: the largest element is in the first, zeros are in the last.
_BINS = 64
SAMPLE: Final = 1 << 16
"""Elements that levels are made from, of a longer leaf."""
_LINE = 8
# Exponents of float32, and what is added to one for that of float64.
_EXPONENTS, _FLOAT64_ABOVE_FLOAT32 = 256, 1023 - 127
# Bins of noise that the rows of one table have at most, all together.
_MOST_BINS = 1 << 13
# Exponent of float64's infinities and NaN, as `_exponents` gives it.
_ENDLESS = 0x7FF
# Elements that a median is made from; where a bin has fewer, its nearest neighbours lend theirs.
_LEAST = 16


@dataclass(frozen=True, eq=False)
class Levels:
    """The lower median of the noise in each bin of magnitude, of the elements that have any.

    A few draws are too few for the noise of one element, and the noise of the whole leaf is that of its largest
    elements: one masked logit of -1e9 has more of it than all others together. Elements of one magnitude mostly share
    their noise, and a median doesn't care about the few that don't.
    """

    top: int
    """The exponent of the largest magnitude, as ``_exponents`` gives it."""
    by_bin: torch.Tensor | None
    """For each bin, in float64 and on the CPU; None where nothing of the leaf has noise."""
    typical: float
    """The lower median of the magnitudes that are not zero; 0 where all are."""
    relative: float
    """The usual noise of a value over its size."""
    _copies: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)
    """``by_bin`` on other devices."""

    def of(self, exact: torch.Tensor) -> torch.Tensor:
        """The level of each of some (finite) elements; zero where nothing of the leaf has noise."""
        if self.by_bin is None:
            return torch.zeros((), dtype=torch.float64, device=exact.device).expand(exact.shape)
        if exact.device not in self._copies:
            self._copies[exact.device] = self.by_bin.to(exact.device)
        return self._copies[exact.device][_bins_of(_exponents(exact), self.top)]

    def weights(self, exact: torch.Tensor) -> torch.Tensor:
        """What makes the noise of all elements about one. Elements of a magnitude that was not in the sample are taken
        to have the usual relative noise."""
        return _weights(self.of(exact), exact, self.relative)


def levels_of(values: torch.Tensor, noise: torch.Tensor) -> Levels:
    """Of a :func:`sample_elements` of a leaf (finite) and the noise of those elements."""
    (levels,) = measure_alone(levels_of_rows(values[None], noise[None]))
    return levels


def levels_of_rows(
    values: torch.Tensor, noise: torch.Tensor, filled_up: Sequence[int] = ()
) -> Measurement[list[Levels]]:
    """:func:`levels_of` for each row of two float64 matrices.

    ``filled_up``: with how many zeros each row ends that are no elements of the leaf; nothing where none has any.
    """
    magnitude, loudness = _exponents(values), _exponents(noise)
    # Noise without an end says nothing of the other elements, and has no middle.
    loudness.masked_fill_(loudness == _ENDLESS, 0)
    is_still = loudness == 0
    highest, loudest = magnitude.amax(1), loudness.amax(1)
    quietest = loudness.masked_fill(is_still, _ENDLESS).amin(1)
    sizes = values.abs()
    medians = _lower_medians(sizes.masked_fill_(sizes == 0, math.nan))
    read = yield torch.stack([each.double() for each in (highest, loudest, quietest, medians)])
    tops, loudest_of, quietest_of, _ = read.tolist()
    # Bins of noise, each a factor of two, the largest in the first. The quietest has one too: beside an element of 1e30
    # the noise of all others would else be as large as the last bin's.
    # Where nothing has noise the quietest is endless.
    bins_of_rows = [max(1, int(loud - quiet) + 1) for loud, quiet in zip(loudest_of, quietest_of, strict=True)]
    noise_bins = (loudest[:, None] - loudness).masked_fill_(is_still, -1)
    magnitude_bins = _bins_of(magnitude, highest[:, None])
    medians_of_bins = torch.zeros(len(values), _BINS, dtype=torch.int64, device="cpu")
    for rows in _split_by_bins(bins_of_rows):
        bins = max(bins_of_rows[row] for row in rows)
        # All of them, but for a leaf whose noise is of many sizes.
        chosen = slice(None) if len(rows) == len(values) else rows
        counts = (yield _count_elements(magnitude_bins[chosen], noise_bins[chosen], bins)).int()
        if filled_up:
            counts[:, -1, -1] -= torch.tensor([filled_up[row] for row in rows], device="cpu")
        medians_of_bins[chosen] = _bin_medians(counts)
    # The middle of a bin: half an exponent above its lower end.
    by_bin = torch.exp2(read[1, :, None] - medians_of_bins - 1022.5)
    typical = read[3].nan_to_num(0.0)
    bins_of_typical = _bins_of(_exponents(typical), read[0].long())
    usual_noise = by_bin.gather(1, bins_of_typical[:, None]).squeeze(1).tolist()
    found = []
    for row, (top, loud, size) in enumerate(zip(tops, loudest_of, typical.tolist(), strict=True)):
        table, relative = None, 0.0
        if loud:
            table = by_bin[row]
            if size:
                relative = usual_noise[row] / size
        found.append(Levels(int(top), table, size, relative))
    return found


def _split_by_bins(bins_of_rows: Sequence[int]) -> Iterator[list[int]]:
    """The rows in lists, so that the tables of a list have no more than so many columns together, or it is one row."""
    listed: list[int] = []
    for row in sorted(range(len(bins_of_rows)), key=bins_of_rows.__getitem__):
        # The last row has the most.
        if listed and (len(listed) + 1) * bins_of_rows[row] > _MOST_BINS:
            yield sorted(listed)
            listed = []
        listed.append(row)
    yield sorted(listed)


def _count_elements(magnitude_bins: torch.Tensor, noise_bins: torch.Tensor, bins: int) -> torch.Tensor:
    """Of each row how many elements have a magnitude and a noise: (rows, _BINS, bins + 1).

    The last column are elements that no draw has moved, whose bin of noise is -1.
    """
    columns = noise_bins.masked_fill(noise_bins < 0, bins)
    rows = torch.arange(len(columns), device=columns.device)[:, None]
    cells = (rows * _BINS + magnitude_bins) * (bins + 1) + columns
    return count_each(cells, len(columns) * _BINS * (bins + 1)).view(len(columns), _BINS, bins + 1)


def _lower_medians(rows: torch.Tensor) -> torch.Tensor:
    """Of each row, NaN aside; NaN where nothing else is there."""
    if rows.device.type == "cpu":
        return rows.nanmedian(1).values
    # Where deterministic algorithms are asked for torch refuses a GPU's median, as it tells a place too.
    places = (rows == rows).sum(1).sub_(1).clamp_(min=0).bitwise_right_shift_(1)
    return rows.sort(1).values.gather(1, places[:, None]).squeeze(1)


def exponent_tables(levels: Sequence[Levels]) -> torch.Tensor:
    """The level of each of the 256 exponents of a positive float32 number (``bits >> 23``): (leaves, 256), in float32
    on the CPU.

    The first is that of zero or of the largest number below float32's normal ones, whichever is smaller. All are zero
    where nothing of the leaf has noise.
    """
    tables = _tables_of(levels)
    tops = torch.tensor([each.top for each in levels], device="cpu")[:, None]
    exponents = torch.arange(_EXPONENTS, device="cpu") + _FLOAT64_ABOVE_FLOAT32
    found = tables.gather(1, _bins_of(exponents, tops))
    found[:, 0] = torch.minimum(found[:, 0], tables[:, -1])
    return found.float()


def _tables_of(levels: Sequence[Levels]) -> torch.Tensor:
    """The level of each bin: (leaves, bins), in float64 on the CPU."""
    silent = torch.zeros(_BINS, dtype=torch.float64, device="cpu")
    return torch.stack([silent if each.by_bin is None else each.by_bin for each in levels])


def weights_of_rows(levels: Sequence[Levels], exact: torch.Tensor) -> torch.Tensor:
    """:meth:`Levels.weights` of each row of a matrix."""
    # The level of each bin, and then the two other numbers.
    others = torch.tensor([(each.top, each.relative) for each in levels], dtype=torch.float64, device="cpu")
    tables = torch.cat([_tables_of(levels), others], 1)
    tables = send(tables, exact.device)
    tops, relative = tables[:, _BINS, None].long(), tables[:, _BINS + 1, None]
    return _weights(tables.gather(1, _bins_of(_exponents(exact), tops)), exact, relative)


def _weights(noise: torch.Tensor, exact: torch.Tensor, relative: float | torch.Tensor) -> torch.Tensor:
    noise = torch.maximum(noise, exact.double().abs().mul_(relative))
    return noise.reciprocal_().nan_to_num_(posinf=0.0)


def _bins_of(magnitude: torch.Tensor, top: int | torch.Tensor) -> torch.Tensor:
    below = (top - magnitude).bitwise_right_shift_(1).clamp_(0, _BINS - 2)
    return below.masked_fill_(magnitude == 0, _BINS - 1)


def sample_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Some 65,536 elements, evenly spread, eight neighbours at a time, as memory is read in lines of so many.

    An odd step, so that it isn't one column of a table.
    """
    return sample_rows(tensor.reshape(1, -1))[0]


def sample_rows(rows: torch.Tensor) -> torch.Tensor:
    """:func:`sample_elements` of each row of a matrix."""
    count, length = rows.shape
    if length <= SAMPLE:
        return rows
    lines = rows[:, : length // _LINE * _LINE].reshape(count, -1, _LINE)
    return lines[:, :: (length // SAMPLE) | 1].reshape(count, -1)


def root_sum_square(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Root of the sum of squares per element, in float64, also where a square is beyond its range."""
    root = first.abs()
    for other in others:
        root = torch.hypot(root, other)
    return root


def _exponents(tensor: torch.Tensor) -> torch.Tensor:
    """The exponent of float64 plus 1023; 0 for zero (and what is too small for a normal number)."""
    return tensor.double().view(torch.int64).bitwise_right_shift(52).bitwise_and_(0x7FF)


def _bin_medians(counts: torch.Tensor) -> torch.Tensor:
    """The bin of the lower median of each bin of magnitude, of its nearest neighbours too where it has few elements.

    ``counts``: (leaves, _BINS, bins of noise + 1) on the CPU; the last column are elements without noise. Returns
    (leaves, _BINS); of a leaf without noise it says nothing.
    """
    bins = torch.arange(_BINS, device="cpu")
    noisy = counts[..., :-1]
    # Row i: how many elements the bins before i have of each noise. So a difference sums the bins low to high.
    sums_before = torch.nn.functional.pad(noisy.cumsum(1), (0, 0, 1, 0))
    loud_before = sums_before.sum(2)
    enough = loud_before[:, -1].clamp(max=_LEAST)
    # So many neighbours on both sides: at most all of them. (bins, neighbours)
    lows = (bins[:, None] - bins).clamp_(min=0)
    highs = (bins[:, None] + bins + 1).clamp_(max=_BINS)
    has_enough = loud_before[:, highs] - loud_before[:, lows] >= enough[:, None, None]
    # The first that is true.
    neighbours = has_enough.int().argmax(2)
    low, high = (bins - neighbours).clamp_(min=0), (bins + neighbours + 1).clamp_(max=_BINS)
    pooled = _rows_at(sums_before, high) - _rows_at(sums_before, low)
    # The first bin is the loudest: the lower median is the last one that has at most half of all before it.
    at_least_so_loud = pooled.cumsum(2)
    medians = (at_least_so_loud <= at_least_so_loud[..., -1:] // 2).sum(2).clamp_(max=noisy.shape[2] - 1)
    # Bins without elements take the median of the nearest one that has some.
    distances = (bins[:, None] - bins).abs().expand(len(counts), -1, -1)
    is_empty = counts.sum(2) == 0
    nearest = distances.masked_fill(is_empty[:, None], _BINS).argmin(2)
    return medians.gather(1, nearest)


def _rows_at(matrices: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Of each matrix the rows at its places."""
    return matrices.gather(1, places[..., None].expand(-1, -1, matrices.shape[2]))


class Projections:
    """Sums over the pieces of one error, each element divided by its usual noise.

    A small error of one sign everywhere hides in the mean square, but not here: rounding noise projects like the
    error of one element, a wrong factor or offset like ``sqrt(count)`` of them.
    """

    def __init__(self, levels: Levels) -> None:
        self._levels = levels
        self._squares = self._along = self._offset = self._size = 0.0
        self._count = 0

    def add(self, error: torch.Tensor, exact: torch.Tensor) -> None:
        """Take one piece in: the error and the exact values, both finite."""
        weights = self._levels.weights(exact)
        error, exact = error * weights, exact * weights
        squares, along, offset, size = read_numbers(error.dot(error), error.dot(exact), error.sum(), exact.dot(exact))
        self.add_sums(squares, along, offset, size, error.numel())

    def add_sums(self, squares: float, along: float, offset: float, size: float, count: int) -> None:
        """Take one piece in, of which these are known: squares of the weighted errors, their products with the
        weighted values, their sum, the squares of those values, and the number of elements."""
        self._squares += squares
        self._along += along
        self._offset += offset
        self._size += size
        self._count += count

    @property
    def mean_square(self) -> float:
        """Mean square."""
        return self._squares / max(1, self._count)

    @property
    def along_values(self) -> float:
        """Squared projection on the values."""
        if self._size <= 0:
            return 0.0
        return _square(self._along) / self._size

    @property
    def along_constant(self) -> float:
        """Squared projection on a constant."""
        return _square(self._offset) / max(1, self._count)

    @property
    def squared_norm(self) -> float:
        """Squared norm of the values."""
        return self._size


def _square(number: float) -> float:
    """The square, of what is larger than 1e150 that of 1e150: Python raises where a power has no end."""
    return min(abs(number), 1e150) ** 2


@dataclass
class Noise:
    """The projections of the noise draws of one leaf."""

    mean_squares: list[float] = field(default_factory=list)
    along_values: list[float] = field(default_factory=list)
    along_constant: list[float] = field(default_factory=list)

    def add(self, draw: Projections) -> None:
        """Take one draw in."""
        self.mean_squares.append(draw.mean_square)
        self.along_values.append(draw.along_values)
        self.along_constant.append(draw.along_constant)

    def extend(self, other: Noise) -> None:
        """Take the draws of another noise in."""
        self.mean_squares += other.mean_squares
        self.along_values += other.along_values
        self.along_constant += other.along_constant

    def excess(self, error: Projections, floor: float) -> float:
        """The larger projection of an error over that of the draws, of which few may be small by luck.

        ``floor`` is the relative offset that is never complained about.
        """
        pooled = sum(self.mean_squares) / max(1, len(self.mean_squares))
        return max(0.0, _ratio(error.along_values, self.along_values, pooled, floor * error.squared_norm**0.5),
                   _ratio(error.along_constant, self.along_constant, pooled, floor * error.squared_norm**0.5))


def _ratio(error: float, draws: list[float], pooled: float, floor: float) -> float:
    """One projection over that of the draws; ``pooled``, their mean square, counts as two further draws."""
    noise = (sum(draws) + 2 * pooled) / (len(draws) + 2)
    # 1e-300: never a division by zero
    ratio: float = error**0.5 / max(noise**0.5 + floor, 1e-300)
    return ratio
