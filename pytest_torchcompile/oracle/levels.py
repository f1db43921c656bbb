"""Levels: the usual noise of a leaf's elements, by their magnitude."""

from __future__ import annotations

import torch

__all__ = ["Levels", "sample"]

_BINS = 64
"""Bins of magnitude, each a factor of four: the largest element is in the first, zeros are in the last."""
_NOISES = 64
"""Bins of noise, each a factor of two, the largest in the first."""
_SAMPLE = 1 << 16
_LEAST = 16
"""Elements that a median is made from; where a bin has fewer, its nearest neighbours lend theirs."""


class Levels:
    """The lower median of the noise in each bin of magnitude, of the elements that have any.

    A few draws are too few for the noise of one element, and the noise of the whole leaf is that of its largest
    elements: one masked logit of -1e9 has more of it than all others together. Elements of one magnitude mostly share
    their noise, and a median doesn't care about the few that don't.
    """

    def __init__(self, value: torch.Tensor, noise: torch.Tensor) -> None:
        """Take a :func:`sample` of a leaf (finite) and the noise of those elements."""
        magnitude, heard = _exponent(value), _exponent(noise)
        self._top, loudest = int(magnitude.amax()), int(heard.amax())
        self._table: torch.Tensor | None = None
        if loudest:
            columns = (loudest - heard).clamp_(max=_NOISES - 1).masked_fill_(heard == 0, _NOISES)
            counts = torch.bincount(self._bin(magnitude) * (_NOISES + 1) + columns, minlength=_BINS * (_NOISES + 1))
            medians = _medians(counts.view(_BINS, _NOISES + 1).tolist())
            levels = [2.0 ** (loudest - median - 1022.5) for median in medians]
            self._table = torch.tensor(levels, dtype=torch.float64, device=value.device)
        self.typical = _lower_median(value.abs())
        """The lower median of the magnitudes that are not zero."""
        typical = torch.full((1,), self.typical, dtype=torch.float64, device=value.device)
        self._relative = float(self.of(typical)) / self.typical if self.typical else 0.0

    def of(self, exact: torch.Tensor) -> torch.Tensor:
        """The level of each of some (finite) elements; zero where nothing of the leaf has noise."""
        if self._table is None:
            return torch.zeros((), dtype=torch.float64, device=exact.device).expand(exact.shape)
        return self._table[self._bin(_exponent(exact))]

    def weights(self, exact: torch.Tensor) -> torch.Tensor:
        """What makes the noise of all elements about one. Elements of a magnitude that was not in the sample are taken
        to have the usual relative noise."""
        noise = torch.maximum(self.of(exact), exact.double().abs() * self._relative)
        return noise.reciprocal_().nan_to_num_(posinf=0.0)

    def _bin(self, magnitude: torch.Tensor) -> torch.Tensor:
        below = (self._top - magnitude).bitwise_right_shift_(1).clamp_(0, _BINS - 2)
        return below.masked_fill_(magnitude == 0, _BINS - 1)


def _lower_median(sizes: torch.Tensor) -> float:
    sizes = sizes[sizes > 0]
    return float(sizes.median()) if sizes.numel() else 0.0


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Up to 65,536 elements, evenly spread; an odd step, so that it isn't one column of a table."""
    flat = tensor.reshape(-1)
    return flat[:: (flat.numel() // _SAMPLE) | 1] if flat.numel() > _SAMPLE else flat


def _exponent(tensor: torch.Tensor) -> torch.Tensor:
    """The exponent of float64 plus 1023; 0 for zero (and what is too small for a normal number)."""
    return tensor.double().view(torch.int64).bitwise_right_shift(52).bitwise_and_(0x7FF)


def _medians(counts: list[list[int]]) -> list[int]:
    """The bin of the lower median of each row, of the row's nearest neighbours too where it has few."""
    heard = [sum(row[:-1]) for row in counts]
    enough = min(_LEAST, sum(heard))
    medians = {}
    for i, row in enumerate(counts):
        if any(row):
            low, high = i, i + 1
            while sum(heard[low:high]) < enough:
                low, high = max(0, low - 1), min(len(counts), high + 1)
            medians[i] = _median([sum(column) for column in zip(*counts[low:high], strict=True)][:-1])
    known = list(medians)
    found, nearest = [], 0
    for i in range(len(counts)):
        while nearest + 1 < len(known) and abs(known[nearest + 1] - i) < abs(known[nearest] - i):
            nearest += 1
        found.append(medians[known[nearest]])
    return found


def _median(counts: list[int]) -> int:
    # the first bin is the loudest: the lower median is the last one that has at most half of all before it
    left = sum(counts) // 2
    for i, count in enumerate(counts):
        left -= count
        if left < 0:
            return i
    return len(counts) - 1
