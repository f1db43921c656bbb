"""Draw rows: one draw of many leaves, taken into their estimates together. Leaves of about one length are the rows of a
matrix.

What :meth:`~pytest_torchcompile.oracle.estimate.Estimate.add` does for each, in the steps of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch

from pytest_torchcompile.oracle.estimate import (
    HUGE,
    Estimate,
    as_real,
    finite_values,
    length_class,
    piece_size,
    small_ones_to_cpu,
    split_groups,
    stack_rows,
    zeros_to_fill,
)
from pytest_torchcompile.oracle.measurement import Measurement, measure_together
from pytest_torchcompile.oracle.noise_levels import Projections, levels_of_rows, sample_rows, weights_of_rows

__all__ = ["add_draw"]

_Drawn: TypeAlias = "tuple[Estimate, torch.Tensor]"


def add_draw(drawn: Iterable[tuple[Estimate, Any]], share: float) -> None:
    """Take one more draw into each of some estimates; ``share`` as for ``Estimate.add``."""
    groups: dict[tuple[object, ...], list[_Drawn]] = {}
    pairs = list(drawn)
    values = small_ones_to_cpu(dict(enumerate(value for _, value in pairs)))
    for number, (estimate, _) in enumerate(pairs):
        value = values[number]
        if _fits_a_row(estimate, value):
            value = as_real(value)
            length = length_class(value.numel())
            key = (length, value.dtype, value.device, estimate.value.device, estimate.spread is not None)
            groups.setdefault(key, []).append((estimate, value))
        else:
            estimate.add(value, share)
    for listed in split_groups(groups.values(), lambda pair: pair[0].value):
        taken = measure_together([_add_rows(rows, share) for rows in listed])
        refused = [rows for rows, is_taken in zip(listed, taken, strict=True) if not is_taken]
        # What is not finite is looked at piece by piece.
        for estimate, value in chain(*refused):
            estimate.add(value, share)


def _fits_a_row(estimate: Estimate, value: Any) -> bool:
    """Whether a draw can be taken in together with others: a leaf that is too long for that is none."""
    if not isinstance(value, torch.Tensor) or not estimate.takes_rows_of(as_real(value)):
        return False
    return value.numel() <= piece_size(value.device)


def _add_rows(rows: Sequence[_Drawn], share: float) -> Measurement[bool]:
    """Whether the draw was taken in: else some deviation is not finite, and nothing was done."""
    estimates = [estimate for estimate, _ in rows]
    exact = stack_rows([estimate.value for estimate in estimates])
    value = stack_rows([value for _, value in rows]).to(exact.device)
    lengths = [value.numel() for _, value in rows]
    error = (value - exact).mul_(share)
    levels = [estimate.levels for estimate in estimates if estimate.levels is not None]
    is_first = not levels
    if is_first:
        sample = sample_rows(exact)
        noise = finite_values(sample_rows(value) - sample).mul_(share)
        levels = yield from levels_of_rows(finite_values(sample), noise, zeros_to_fill([value for _, value in rows]))
    weights = weights_of_rows(levels, exact)
    distance = error.abs()
    largest = [exact.abs().amax(1), distance.amax(1)]
    error, exact = error * weights, exact * weights
    sums = [error.square().sum(1), (error * exact).sum(1), error.sum(1), exact.square().sum(1)]
    # Others are measured before what follows, and memory is short.
    del error, exact, value, weights
    numbers = (yield torch.stack([*sums, *largest])).tolist()
    if not all(map(math.isfinite, chain(*numbers))) or max(numbers[-2]) > HUGE:
        return False
    near = distance.to(torch.bfloat16)
    spreads = distance.to(estimates[0].spread_dtype)
    for row, (estimate, length) in enumerate(zip(estimates, lengths, strict=True)):
        if is_first:
            estimate.begin_deviations(spreads[row, :length], near[row, :length], levels[row])
        else:
            estimate.add_deviation(spreads[row, :length], near[row, :length])
        projections = Projections(levels[row])
        squares, along, offset, size = (vector[row] for vector in numbers[:4])
        projections.add_sums(squares, along, offset, size, length)
        estimate.noise.add(projections)
        estimate.draws += 1
    return True
