"""Run noise: how much a figure differs between runs of one version, and whether two versions differ by more than that.

Nothing is assumed of its distribution: a busy machine makes outliers. Two runs of one version differ by noise alone, in
each cell and in all of them together; those differences are the yardstick.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from pytest_torchcompile.gate.baseline import Change
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.policy_limits import worst_rank

__all__ = ["is_beyond_noise"]

_Logarithms: TypeAlias = Mapping[str, float]
"""Cell to the logarithm of its figure, in one run."""

MARGIN: Final = 2.0
"""So many times the largest difference between runs of one version."""


def is_beyond_noise(change: Change, befores: Sequence[Mapping[str, JudgedCell]],
                    afters: Sequence[Mapping[str, JudgedCell]]) -> bool:
    """Is the smallest difference between both versions beyond the largest one between two runs of one of them?

    ``change``: of kind ``slower``. Of several cells: by the median of their ratios. Of one cell: what is left of its
    ratio without that median, held against what is left in every cell, for an outlier may come in any of them.
    """
    cells = _cells_with_figure(change.metric, [*befores, *afters])
    old = [_logarithms(run, change.metric, cells) for run in befores]
    new = [_logarithms(run, change.metric, cells) for run in afters]
    own = [*itertools.combinations(old, 2), *itertools.combinations(new, 2)]
    both = list(itertools.product(old, new))
    if len(change.cells) > 1:
        between = min(abs(_shift(*pair)) for pair in both)
        noise = max(abs(_shift(*pair)) for pair in own)
    else:
        between = min(abs(_left_over(*pair)[change.cells[0]]) for pair in both)
        noise = max(_largest_left_over(*pair) for pair in own)
    return between > MARGIN * noise


def _cells_with_figure(metric: str, runs: Sequence[Mapping[str, JudgedCell]]) -> list[str]:
    """Cells of which each run has the figure, above nothing."""
    cells = list(runs[0])
    for run in runs:
        cells = [name for name in cells if name in run and _figure(run[name], metric) > 0]
    return cells


def _figure(cell: JudgedCell, metric: str) -> float:
    return worst_rank(cell.ranks, metric) or 0.0


def _logarithms(run: Mapping[str, JudgedCell], metric: str, cells: Sequence[str]) -> _Logarithms:
    return {name: math.log(_figure(run[name], metric)) for name in cells}


def _shift(one: _Logarithms, other: _Logarithms) -> float:
    """The median over the cells of the logarithm of their ratio."""
    return statistics.median(other[name] - one[name] for name in one)


def _largest_left_over(one: _Logarithms, other: _Logarithms) -> float:
    return max(map(abs, _left_over(one, other).values()))


def _left_over(one: _Logarithms, other: _Logarithms) -> dict[str, float]:
    """Of each cell, what the median of all does not explain."""
    shift = _shift(one, other)
    return {name: other[name] - one[name] - shift for name in one}
