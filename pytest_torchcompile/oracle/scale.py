"""Scale: how large the rounding noise of one leaf is, as a whole, in its projections and per element."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pytest_torchcompile.oracle.estimate import Estimate, finite, pieces
from pytest_torchcompile.oracle.units import unit_of

__all__ = ["Scale", "assumed", "drawn"]

EAGER_ONLY_UNITS = 16.0
"""Without a reference: the assumed noise in unit roundoffs of an element and of its leaf's mean size."""
_LEAST = 1e-150
"""Smallest scale, whose square is still a number."""


@dataclass(frozen=True)
class Scale:
    """What errors are measured from, and what they are divided by."""

    centre: torch.Tensor
    dtype: torch.dtype
    spread: torch.Tensor | None
    """Root of the sum of squared draws per element, flat; eager's own draw is not in it."""
    eager: torch.Tensor | None
    """The eager values, where their error counts as a draw (the first of the lists below)."""
    means: list[float]
    """Mean square of each draw."""
    along: list[float]
    """Squared projection of each draw on the centre."""
    offset: list[float]
    """Squared projection of each draw on a constant."""
    norm: float
    relative: float = 0.0
    """Noise of an element relative to its size, where nothing was drawn."""

    @property
    def pooled(self) -> float:
        """Mean square of the whole leaf: what eager itself shows, or what the draws show if that is more."""
        alone = self.means if self.eager is None else self.means[1:]
        return max(self.means[0] if self.means else 0.0, sum(alone) / max(1, len(alone)))

    @property
    def tiny(self) -> float:
        """Absolute floor: half a step of subnormals, some for float16, whose subnormals are in daily use."""
        info = torch.finfo(self.dtype)
        return 2.0**-25 if self.dtype == torch.float16 else max(info.tiny * info.eps / 2, _LEAST)

    def floor(self, exact: torch.Tensor) -> torch.Tensor:
        """One rounding of the result: no error is measured in less."""
        return unit_of(self.dtype) * exact.abs() + self.tiny

    def elements(self, exact: torch.Tensor, spread: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
        """Noise per element of one piece of the leaf.

        The mean of the squared draws, shrunk by one draw towards the whole leaf, so that an element whose few
        draws are small by luck does not get a tolerance of nothing.
        """
        squares = spread.double().square() + finite(eager.double() - exact).square() + self.pooled
        draws = 0 if self.relative else len(self.means)
        noise = (squares / (draws + 1)).sqrt()
        return torch.maximum(torch.maximum(noise, self.floor(exact)), self.relative * exact.abs())


def drawn(eager: torch.Tensor, dtype: torch.dtype, estimate: Estimate, *, with_eager: bool) -> Scale:
    """The scale that noise draws give, with eager's own error as one more draw or without."""
    means, along, offset = list(estimate.means), list(estimate.along), list(estimate.offset)
    if with_eager:
        squares = projection = total = 0.0
        for mine, exact in pieces(eager, estimate.value):
            error = finite(mine.double() - exact)
            squares += float(error.square().sum())
            projection += float((error * finite(exact)).sum())
            total += float(error.sum())
        means.insert(0, squares / eager.numel())
        along.insert(0, (projection / estimate.norm) ** 2 if estimate.norm > 0 else 0.0)
        offset.insert(0, total**2 / eager.numel())
    own = eager if with_eager else None
    return Scale(estimate.value, dtype, estimate.spread, own, means, along, offset, estimate.norm)


def assumed(eager: torch.Tensor, dtype: torch.dtype, twin: Estimate | None) -> Scale:
    """A scale from the dtype, with eager as the centre; larger where a second eager run differs by more.

    Per element ``16 * unit`` of its own size and of the leaf's root mean square. An offset of that size is
    one unit of bias.
    """
    wide = finite(eager.double())
    noise = EAGER_ONLY_UNITS * unit_of(dtype)
    square = float(wide.square().mean())
    mean, spread = noise**2 * square, None
    if twin is not None and twin.continuous and twin.value.shape == eager.shape:
        again = finite(twin.value.double() - eager.double())
        mean, spread = max(mean, float(again.square().mean())), again.abs().flatten()
    norm = (square * eager.numel()) ** 0.5
    shift = (noise * norm) ** 2
    return Scale(eager, dtype, spread, None, [mean], [shift], [shift], norm, noise)
