"""Draw rows: one draw of many leaves, taken into their estimates together. Leaves of one length are rows of a matrix.

What :meth:`~pytest_torchcompile.oracle.estimate.Estimate.add` does for each, in the steps of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from pytest_torchcompile.oracle.estimate import HUGE, Estimate, as_real, finite_values, split_leaves
from pytest_torchcompile.oracle.noise_levels import Projections, levels_of_rows, sample_rows, weights_of_rows

__all__ = ["add_draw"]


def add_draw(drawn: Iterable[tuple[Estimate, Any]], share: float) -> None:
    """Take one more draw into each of some estimates; ``share`` as for ``Estimate.add``."""
    groups: dict[tuple[object, ...], list[tuple[Estimate, torch.Tensor]]] = {}
    for estimate, value in drawn:
        if isinstance(value, torch.Tensor) and estimate.takes_rows_of(as_real(value)):
            value = as_real(value)
            begun = estimate.spread is not None
            key = (value.numel(), value.dtype, value.device, estimate.value.device, begun)
            groups.setdefault(key, []).append((estimate, value))
        else:
            estimate.add(value, share)
    for group in groups.values():
        first, _ = group[0]
        for rows in split_leaves(group, first.value):
            # A single one is looked at piece by piece, and so is what is not finite.
            if len(rows) == 1 or not _add_rows([estimate for estimate, _ in rows], [value for _, value in rows], share):
                for estimate, value in rows:
                    estimate.add(value, share)


def _add_rows(estimates: Sequence[Estimate], values: Sequence[torch.Tensor], share: float) -> bool:
    """Whether the draw was taken in: else some deviation is not finite, and nothing was done."""
    exact = torch.stack([estimate.value.reshape(-1) for estimate in estimates])
    # A small leaf of a GPU is expected on the CPU: its values get there all at once.
    value = torch.stack([value.reshape(-1) for value in values]).to(exact.device)
    error = (value - exact).mul_(share)
    levels = [estimate.levels for estimate in estimates if estimate.levels is not None]
    is_first = not levels
    if is_first:
        sample = sample_rows(exact)
        noise = finite_values(sample_rows(value) - sample).mul_(share)
        levels = levels_of_rows(finite_values(sample), noise)
    weights = weights_of_rows(levels, exact)
    weighted_error, weighted = error * weights, exact * weights
    distance = error.abs()
    sums = [weighted_error.square().sum(1), (weighted_error * weighted).sum(1), weighted_error.sum(1),
            weighted.square().sum(1)]
    largest = [exact.abs().amax(1), distance.amax(1)]
    numbers = torch.stack([*sums, *largest]).tolist()
    if not all(map(math.isfinite, chain(*numbers))) or max(numbers[-2]) > HUGE:
        return False
    near = distance.to(torch.bfloat16)
    if is_first:
        spreads = distance.to(estimates[0].spread_dtype)
        for row, estimate in enumerate(estimates):
            estimate.begin_deviations(spreads[row], near[row], levels[row])
    else:
        for row, estimate in enumerate(estimates):
            estimate.add_deviation(distance[row], near[row])
    for row, estimate in enumerate(estimates):
        projections = Projections(levels[row])
        squares, along, offset, size = (vector[row] for vector in numbers[:4])
        projections.add_sums(squares, along, offset, size, exact.shape[1])
        estimate.noise.add(projections)
        estimate.draws += 1
    return True
