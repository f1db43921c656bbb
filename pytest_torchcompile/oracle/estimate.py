"""Estimate: the expected value of one leaf and the size of its rounding noise, gathered draw by draw."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Estimate", "as_real", "finite", "pieces"]

_PIECES = {"cpu": 1 << 17}
"""Elements looked at in one go: what bounds the memory of a comparison; on a CPU what its cache holds."""
_PIECE = 1 << 22
_FINE = 1 << 20
"""Leaves with fewer elements have their spread kept in float64."""
_NEAR = 0.9
"""Share of a dtype's range beyond which rounding decides about overflow."""


class Estimate:
    """The reference value of a leaf and what the noise draws did to it.

    No draw is stored: ``spread`` is the root of the sum of squared deviations per element, the rest are
    scalars per draw. So memory does not grow with the number of draws.
    """

    def __init__(self, value: Any, largest: float = float("inf")) -> None:
        """Start with the value itself; ``largest`` is the end of the range of eager's dtype."""
        self.value = _number(value)
        self.spread: torch.Tensor | None = None
        self.flips: torch.Tensor | None = None
        """Discrete leaves: which elements some draw flipped."""
        self.brink: torch.Tensor | None = None
        """Which elements (flat) are beyond the range of eager's dtype in some draw, or near its end."""
        self._near = _NEAR * largest
        self.means: list[float] = []
        self.along: list[float] = []
        """Per draw: squared projection of its error on the value."""
        self.offset: list[float] = []
        """Per draw: squared projection of its error on a constant."""
        self.odd = 0
        """Draws of another type or shape: rounding decides about the shape itself."""
        self.norm = 0.0
        if self.continuous:
            self._confine()
            self.norm = sum(float(finite(piece).square().sum()) for (piece,) in pieces(self.value)) ** 0.5

    @property
    def continuous(self) -> bool:
        """Whether this leaf is a tensor of floating numbers."""
        return isinstance(self.value, torch.Tensor) and self.value.is_floating_point()

    @property
    def nbytes(self) -> int:
        """Memory of the tensors it holds."""
        held = (self.value, self.spread, self.flips, self.brink)
        return sum(t.numel() * t.itemsize for t in held if isinstance(t, torch.Tensor))

    def add(self, value: Any) -> None:
        """Take one more noise draw in."""
        if not isinstance(self.value, torch.Tensor):
            self.odd += self.value != value if isinstance(value, (bool, int, str, type(None))) else 0
            return
        value = _number(value)
        alike = isinstance(value, torch.Tensor) and value.shape == self.value.shape
        if not alike or value.dtype != self.value.dtype:
            self.odd += 1
        elif self.continuous:
            self._deviate(value)
        else:
            flips = value != self.value
            self.flips = flips if self.flips is None else self.flips | flips

    def repeated_by(self, value: Any, unit: float) -> bool:
        """Whether another run without noise came to the same value, within one rounding of its mean size."""
        value = _number(value)
        if not isinstance(self.value, torch.Tensor) or not isinstance(value, torch.Tensor):
            return bool(self.value == value)
        if value.shape != self.value.shape or not self.continuous:
            return value.shape == self.value.shape and torch.equal(value, self.value)
        error = sum(float(finite(a - b).square().sum()) for a, b in pieces(value, self.value))
        return bool(error**0.5 <= unit * self.norm)

    def _confine(self) -> None:
        """Values beyond the range of eager's dtype become infinite: nothing is measured from them."""
        if self._near < float("inf"):
            beyond = self.value.isfinite() & (self.value.abs() > self._near)
            if bool(beyond.any()):
                self.value = self.value.masked_fill(beyond, float("inf"))
                self.brink = beyond.flatten()

    def _deviate(self, value: torch.Tensor) -> None:
        if self.spread is None:
            fine = self.value.dtype == torch.float64 and self.value.numel() < _FINE
            dtype = torch.float64 if fine else torch.float32
            self.spread = torch.zeros(self.value.numel(), dtype=dtype, device=self.value.device)
        squares = along = offset = 0.0
        start = 0
        for spread, exact, drawn in pieces(self.spread, self.value, value):
            error = drawn - exact
            square = float(error.dot(error))
            if not math.isfinite(square) or self._near < float("inf"):
                self._look(start, exact.isfinite() & ~(drawn.abs() <= self._near))  # NaN is not smaller
                error, exact = finite(error), finite(exact)
                square = float(error.dot(error))
            torch.hypot(spread, error.to(spread.dtype), out=spread)
            squares += square
            along += float(error.dot(exact))
            offset += float(error.sum())
            start += drawn.numel()
        count = max(1, value.numel())
        self.means.append(squares / count)
        self.along.append((along / self.norm) ** 2 if self.norm > 0 else 0.0)
        self.offset.append(offset**2 / count)

    def _look(self, start: int, beyond: torch.Tensor) -> None:
        if bool(beyond.any()):
            if self.brink is None:
                self.brink = torch.zeros(self.value.numel(), dtype=torch.bool, device=self.value.device)
            self.brink[start : start + beyond.numel()] |= beyond


def _number(value: Any) -> Any:
    """A Python float or complex number as a tensor, complex tensors as real ones."""
    if isinstance(value, (float, complex)):
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.complex128)
    return as_real(value) if isinstance(value, torch.Tensor) else value


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of real numbers (one more axis), any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def finite(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with zeros for NaN and infinities."""
    return tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same stretch of every tensor, flattened, so many elements at a time that memory stays bounded."""
    size = _PIECES.get(tensors[0].device.type, _PIECE)
    yield from zip(*(torch.split(t.reshape(-1), size) for t in tensors), strict=True)
