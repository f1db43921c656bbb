"""Projections: how large an error is as a whole, and how much of it points one way. Elements count by their noise."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pytest_torchcompile.oracle.levels import Levels

__all__ = ["Noise", "Projections"]


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
        self._squares += float(error.dot(error))
        self._along += float(error.dot(exact))
        self._offset += float(error.sum())
        self._size += float(exact.dot(exact))
        self._count += error.numel()

    @property
    def mean(self) -> float:
        """Mean square."""
        return self._squares / max(1, self._count)

    @property
    def along(self) -> float:
        """Squared projection on the values."""
        return self._along**2 / self._size if self._size > 0 else 0.0

    @property
    def offset(self) -> float:
        """Squared projection on a constant."""
        return self._offset**2 / max(1, self._count)

    @property
    def size(self) -> float:
        """Squared norm of the values."""
        return self._size


@dataclass
class Noise:
    """The projections of the noise draws of one leaf."""

    means: list[float] = field(default_factory=list)
    along: list[float] = field(default_factory=list)
    offset: list[float] = field(default_factory=list)

    def add(self, draw: Projections) -> None:
        """Take one draw in."""
        self.means.append(draw.mean)
        self.along.append(draw.along)
        self.offset.append(draw.offset)

    def excess(self, error: Projections, floor: float) -> float:
        """The larger projection of an error over that of the draws, of which few may be small by luck.

        ``floor`` is the relative offset that is never complained about.
        """
        pooled = sum(self.means) / max(1, len(self.means))
        found = 0.0
        for mine, draws in ((error.along, self.along), (error.offset, self.offset)):
            noise = (sum(draws) + 2 * pooled) / (len(draws) + 2)
            found = max(found, mine**0.5 / max(noise**0.5 + floor * error.size**0.5, 1e-300))
        return found
