"""Settling: leaves that are shown to be right in one go, which nearly all leaves of a right program are.

The numbers of :mod:`~pytest_torchcompile.oracle.judging`, made of many leaves at once: leaves of one length are the
rows of a matrix. In float32, once the differences are taken in float64. Whatever leaves a doubt is judged there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from pytest_torchcompile.oracle.estimate import Estimate, as_real, small_ones_to_cpu, split_groups
from pytest_torchcompile.oracle.expected import WIDER, Reference
from pytest_torchcompile.oracle.judging import ASIDE, grain_of, index_of, limits_without_draws, new_leaf
from pytest_torchcompile.oracle.leaf_limits import Leaf, Limits, problem
from pytest_torchcompile.oracle.leaf_rows import LeafRow, Sums, measure_rows
from pytest_torchcompile.oracle.leaf_state import LeafValues
from pytest_torchcompile.oracle.measurement import Measurement, measure_together
from pytest_torchcompile.oracle.noise_levels import Levels

__all__ = ["Settling", "settle"]

# Dtypes whose differences float32 holds.
_NARROW = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class Settling:
    """What is known of a leaf, settled or not."""

    leaf: Leaf
    """Measured."""
    is_settled: bool
    """Whether no doubt is left that it is right."""
    wants_draw: bool
    """Whether eager's error is a measure, and the leaf over what passes by it: a draw will tell."""
    is_near: bool
    """Whether eager is so near to what is expected that its error is rounding: :meth:`Estimate.is_near`."""
    is_calm: bool | None
    """Whether draws move no element by much, or the leaf is zero but for them: a second eager run says no more. None
    where nothing was drawn."""
    expected_size: float
    eager_size: float
    """Root mean squares of the values."""
    is_far_off: bool
    """Whether most of what has a value is off, and the leaf as a whole by a hundred times its noise."""
    usual: float
    """The mean size of the expected values."""
    typical: float
    """The lower median of those that are not zero."""
    apart: float
    """The largest difference of eager and compiled."""


def settle(unsettled: Iterable[LeafValues], reference: Reference, limits: Limits) -> dict[str, Settling]:
    """Measure leaves in units of the noise that is known: of eager's own error, and of the draws that there are.

    Args:
        unsettled: What differs. Nothing is said of values that are no narrow floating numbers, or that are nowhere
            expected.
        reference: What is expected.
        limits: Say which elements count as wrong. A leaf has to hold them, and stricter ones before any draw.

    Returns:
        By name, of all that is finite and neither too large nor too small for float32. A leaf is not settled where any
        doubt is left: it is over a limit, undecided, or eager is so far from what is expected that its error is no
        measure.
    """
    found: dict[str, Settling] = {}
    if reference.kind not in WIDER:
        return found
    for groups in split_groups(_rows_by_group(unsettled, reference), lambda row: row.estimate.value):
        measured = measure_together([measure_rows(rows, limits) for rows in groups])
        settlings = []
        for row, sums in zip(chain(*groups), chain(*measured), strict=True):
            if sums is not None:
                settlings.append(_settling_of(row, sums, reference, limits))
        for settling in measure_together(settlings):
            found[settling.leaf.name] = settling
    return found


def _rows_by_group(unsettled: Iterable[LeafValues], reference: Reference) -> list[list[LeafRow]]:
    """Those that can be measured in one go, as groups of about one length."""
    fitting = {}
    for values in unsettled:
        estimate = reference.estimates.get(values.name)
        if estimate is not None and _fits(values.eager, estimate):
            fitting[values.name] = values
    # A small leaf of a GPU is expected on the CPU.
    eager = small_ones_to_cpu({name: values.eager for name, values in fitting.items()})
    compiled = small_ones_to_cpu({name: values.compiled.to(values.eager.dtype) for name, values in fitting.items()})
    groups: dict[tuple[object, ...], list[LeafRow]] = {}
    for name, values in fitting.items():
        leaf = new_leaf(name, values.kind, eager[name])
        row = LeafRow(leaf, eager[name], compiled[name], reference.estimates[name])
        groups.setdefault(row.group, []).append(row)
    return list(groups.values())


def _fits(eager: Any, estimate: Estimate) -> bool:
    """Whether float32 can hold eager's values, and they can be measured from what is expected."""
    if estimate.brink is not None or not estimate.continuous or bool(estimate.offered) != bool(estimate.draws):
        return False
    if not isinstance(eager, torch.Tensor) or not eager.numel():
        return False
    eager = as_real(eager)
    return eager.dtype in _NARROW and estimate.value.shape == eager.shape


def _settling_of(row: LeafRow, sums: Sums, reference: Reference, limits: Limits) -> Measurement[Settling]:
    estimate = row.estimate
    size = (sums.size / sums.count) ** 0.5
    is_near = estimate.is_so_near(sums.apart, sums.size, row.eager.dtype)
    leaf = _measured_leaf(row, sums, reference, limits)
    settled: Leaf | None = leaf
    strict = limits
    is_measure = is_near
    is_calm = None
    if estimate.draws:
        is_calm = estimate.is_calm_at(size, sums.reach)
        # Where eager is off by more than noise its error is no draw.
        mine, *others = sums.noise.mean_squares
        is_measure = mine <= ASIDE**2 * max(sum(others) / len(others), 1.0)
    else:
        strict = limits_without_draws(limits)
        if is_near and sums.peak > strict.peak:
            settled = yield from _with_peak_by_rows(leaf, row, sums.levels)
    # Around eager, where its error is no draw, the leaf may be near.
    is_far_off = is_measure and leaf.far_off_among(int(sums.filled))
    is_measure = is_measure and bool(sums.has_signal) and leaf.decided
    is_settled = is_measure and settled is not None and problem(settled, strict) is None
    if is_settled and settled is not None:
        leaf = settled
    return Settling(
        leaf=leaf,
        is_settled=is_settled,
        wants_draw=is_measure and not is_settled and not estimate.draws,
        is_near=is_near,
        is_calm=is_calm,
        is_far_off=is_far_off,
        expected_size=size,
        eager_size=(max(0.0, sums.size + 2 * sums.across + sums.apart) / sums.count) ** 0.5,
        usual=sums.sizes / sums.count,
        typical=sums.levels.typical,
        apart=sums.farthest_apart,
    )


def _measured_leaf(row: LeafRow, sums: Sums, reference: Reference, limits: Limits) -> Leaf:
    """The leaf with its numbers."""
    return replace(row.leaf, rms=(sums.squares / sums.count) ** 0.5, bias=sums.bias(limits), peak=sums.peak,
                   grain=_grain_of(sums, row.eager.dtype), wrong=sums.wrong / sums.count, blind=int(sums.blind),
                   against=reference.kind, why=reference.why, draws=row.estimate.draws + 1,
                   index=index_of(int(sums.worst), row.eager.shape), eager=sums.eager_there,
                   compiled=sums.compiled_there, expected=sums.expected_there)


def _with_peak_by_rows(leaf: Leaf, row: LeafRow, levels: Levels) -> Measurement[Leaf | None]:
    """The leaf with its worst element in units of the noise of its row and column; None where these tell none."""
    # Of outputs nobody knows that they are products.
    if leaf.kind != "gradient":
        return None
    # Here, for few leaves need it.
    from pytest_torchcompile.oracle.row_noise import worst_by_rows

    expected = row.estimate.value
    found = yield from worst_by_rows(row.eager, row.compiled, expected, levels)
    if found is None:
        return None
    peak, place = found
    there = [tensor.reshape(-1)[place].double() for tensor in (row.eager, row.compiled, expected)]
    eager, compiled, exact = (yield torch.stack(there)).tolist()
    return replace(leaf, peak=peak, index=index_of(place, row.eager.shape), eager=eager, compiled=compiled,
                   expected=exact)


def _grain_of(sums: Sums, dtype: torch.dtype) -> float | None:
    """The largest error in units of the leaf's largest value; None if most of what is wrong has lost its value."""
    if sums.lost > sums.wrong - sums.lost:
        return None
    return grain_of(sums.farthest, sums.largest, dtype)


