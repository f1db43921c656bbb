"""Scale: what an estimate gives to judge by, how large the noise is per element and in its projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from pytest_torchcompile.oracle.estimate import Estimate, finite_values, split_pieces
from pytest_torchcompile.oracle.noise_levels import (
    Levels,
    Noise,
    Projections,
    levels_of,
    root_sum_square,
    sample_elements,
)
from pytest_torchcompile.oracle.operator_rounding import smallest_noise, unit_of

__all__ = ["EAGER_ONLY_UNITS", "SEEN", "Scale", "scale_from_draws", "scale_from_dtype", "scale_from_eager"]

EAGER_ONLY_UNITS: Final = 16.0
"""Without a reference: the assumed noise in unit roundoffs of an element and of its leaf's typical size."""
# An element that some draw takes this many times its noise away jumps: the noise has flipped a decision there.
_JUMP = 3.0
SEEN: Final = 6.0
"""A jump as large as one that was seen counts for so many times the noise of one element."""


@dataclass(frozen=True)
class Scale:
    """What errors are measured from, and what they are divided by."""

    centre: torch.Tensor
    dtype: torch.dtype
    draws: int
    """How many draws there are, eager's own rounding among them; 0 where nothing was drawn."""
    spread: torch.Tensor
    """Root of the sum of squared draws per element, flat; eager's own draw is not in it."""
    reach: torch.Tensor
    """The largest draw per element, flat."""
    eager: torch.Tensor
    """Eager's values where their error counts as a draw, else the centre."""
    levels: Levels
    """The usual noise by magnitude."""
    weights: Levels
    """What the projections were made with."""
    noise: Noise
    relative: float = 0.0
    """Noise of an element relative to its size, where nothing was drawn."""

    @property
    def tiny(self) -> float:
        """Absolute floor."""
        return smallest_noise(self.dtype)

    def element_noise(
        self, exact: torch.Tensor, spread: torch.Tensor, reach: torch.Tensor, eager: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Noise per element of one piece of the leaf, and which elements jump.

        The mean of the squared draws, shrunk by one draw towards what is usual for elements of this magnitude, so
        that an element whose few draws are small by luck does not get a tolerance of nothing. Never less than one
        rounding of the result, nor than a sixth of the largest draw: where noise has flipped a decision, that is what
        it did.
        """
        own = finite_values(eager.double() - exact)
        noise = root_sum_square(spread.double(), own, self.levels.of(exact)).mul_((self.draws + 1) ** -0.5)
        noise = torch.maximum(noise, exact.abs() * max(unit_of(self.dtype), self.relative) + self.tiny)
        reach = reach.double()
        return torch.maximum(noise, reach / SEEN), reach > _JUMP * noise


def scale_from_draws(eager: torch.Tensor, dtype: torch.dtype, estimate: Estimate, *, with_eager: bool) -> Scale:
    """The scale that noise draws give, with eager's own error as one more draw or without.

    ``estimate`` has at least one draw.
    """
    if estimate.spread is None or estimate.reach is None or estimate.levels is None:
        raise ValueError("an estimate without draws has no scale")
    noise, own = Noise(), Projections(estimate.levels)
    if with_eager:
        for mine, exact in split_pieces(eager, estimate.value):
            own.add(finite_values(mine.double() - exact), finite_values(exact.double()))
        noise.add(own)
    noise.extend(estimate.noise)
    draws = estimate.draws + with_eager
    exact, few = sample_elements(estimate.value), [sample_elements(estimate.spread).double()]
    if with_eager:
        few.append(finite_values(sample_elements(eager).double() - exact))
    levels = levels_of(finite_values(exact), root_sum_square(*few).mul_(draws**-0.5))
    eager_draw = eager if with_eager else estimate.value
    return Scale(estimate.value, dtype, draws, estimate.spread, estimate.reach, eager_draw, levels, estimate.levels,
                 noise)


def scale_from_eager(eager: torch.Tensor, dtype: torch.dtype, estimate: Estimate) -> Scale:
    """The scale that eager's own error gives, the one draw that costs nothing."""
    exact = sample_elements(estimate.value)
    levels = levels_of(finite_values(exact), finite_values(sample_elements(eager).double() - exact))
    noise, own = Noise(), Projections(levels)
    for mine, value in split_pieces(eager, estimate.value):
        own.add(finite_values(mine.double() - value), finite_values(value.double()))
    noise.add(own)
    nothing = torch.zeros((), device=eager.device).expand(eager.numel())
    return Scale(estimate.value, dtype, 1, nothing, nothing, eager, levels, levels, noise)


def scale_from_dtype(eager: torch.Tensor, dtype: torch.dtype, twin: Estimate | None, unit: float = 0.0) -> Scale:
    """A scale from the dtype, with eager as the centre; larger where a second eager run differs by more.

    Per element ``16 * unit`` of its own size and of the typical one; ``unit``, if it is larger than the dtype's, is
    that of a narrower dtype in which parts were computed (autocast). An offset of that size is one unit of
    bias.
    """
    again = eager
    if twin is not None and twin.continuous and twin.value.shape == eager.shape:
        again = twin.value
    relative = EAGER_ONLY_UNITS * max(unit_of(dtype), unit)
    wide = finite_values(sample_elements(eager).double())
    sizes = wide.abs()
    usual = 0.0
    if bool((sizes > 0).any()):
        usual = float(sizes[sizes > 0].median())
    levels = levels_of(wide, torch.full_like(wide, relative * usual).clamp_(min=relative * sizes))
    noise = Noise()
    nothing = torch.zeros((), device=eager.device).expand(eager.numel())
    offset = Projections(levels)
    for (mine,) in split_pieces(eager):
        exact = finite_values(mine.double())
        offset.add(exact * relative, exact)
    noise.add(offset)
    return Scale(eager, dtype, 0, nothing, nothing, again, levels, levels, noise, relative)
