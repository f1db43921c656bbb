"""Slower: is a time, a speedup or a size worse than in the baseline by more than the spread?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.policy_limits import caches, worst
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.metrics import METRICS, metric_spread

__all__ = ["Change", "Pairs", "slower"]

Pairs: TypeAlias = "Mapping[str, tuple[JudgedCell, JudgedCell]]"
"""Cell to what it is now and what it was."""

SIGMAS: Final = 4.0
"""How many standard deviations are more than the spread."""
FEWEST: Final = 5
"""Cells from which the spread of single measurements can be told."""
LEAST_SIGMA: Final = 0.05
"""Relative: a spread that looks smaller was not seen often enough."""
LEAST_RATIO: Final = 1.25
LEAST_SECONDS: Final = 0.5
"""A compile that takes so little longer is not worth a word."""


@dataclass(frozen=True)
class Change:
    """One thing that is not as in the baseline."""

    kind: str
    """A key of :data:`~pytest_torchcompile.gate.policy.BASELINE`, or ``improved`` or ``new``."""
    text: str
    cells: tuple[str, ...]
    file: str = ""
    line: int = 0
    check: str = ""
    """The check that held; of ``failures`` only."""
    sure: bool = True
    """False: of single measurements, whose spread was taken from that between cells."""


def slower(both: Pairs, name: str) -> Iterator[Change]:
    """By the spread of its repetitions where the section tells it; else by the spread between the cells' ratios."""
    factor = 1 if METRICS[name].kind == "max" else -1
    singles: dict[str, float] = {}
    for cell, (now, then) in both.items():
        new, old = worst(now.ranks, name), worst(then.ranks, name)
        if not new or not old or min(new, old) <= 0:
            continue
        spreads = [_spread(each, name) for each in (now, then)]
        if None not in spreads:
            sigma = math.hypot(*(each or 0.0 for each in spreads))
            if factor * (new - old) > SIGMAS * sigma and factor * math.log(new / old) > math.log(1.02):
                text = f"{_was(cell, name, old, new)}, more than {SIGMAS:g} times the spread of {sigma:.2g}"
                yield Change("slower", text, (cell,))
        elif name != "compile_seconds" or caches(now.ranks) == caches(then.ranks):
            singles[cell] = factor * math.log(new / old)
    if len(singles) >= FEWEST:
        yield from _outliers(singles, both, name)


def _spread(cell: JudgedCell, name: str) -> float | None:
    """The largest of its ranks'."""
    return max((sigma for sections in cell.ranks if (sigma := metric_spread(sections, name)) is not None), default=None)


def _outliers(ratios: Mapping[str, float], both: Pairs, name: str) -> Iterator[Change]:
    """All cells together, and those that stand out from them."""
    shift = statistics.median(ratios.values())
    sigma = max(LEAST_SIGMA, 1.4826 * statistics.median(abs(ratio - shift) for ratio in ratios.values()))
    if shift > max(math.log(LEAST_RATIO), SIGMAS * 1.2533 * sigma / math.sqrt(len(ratios))):
        text = f"{METRICS[name].help}: {_times(shift)} worse than in the baseline, the median of " \
               f"{count(len(ratios), 'cell')}"
        yield Change("slower", text, tuple(ratios), sure=False)
    for cell, ratio in ratios.items():
        new, old = (worst(each.ranks, name) or 0.0 for each in both[cell])
        little = name == "compile_seconds" and abs(new - old) < LEAST_SECONDS
        if ratio - shift > max(SIGMAS * sigma, math.log(LEAST_RATIO)) and not little:
            text = f"{_was(cell, name, old, new)}, {_times(ratio - shift)} as much as the other cells'"
            yield Change("slower", text, (cell,), sure=False)


def _times(logarithm: float) -> str:
    return f"{math.exp(min(logarithm, 50.0)):.2f} times"


def _was(cell: str, name: str, old: float, new: float) -> str:
    metric = METRICS[name]
    return f"{cell}: {metric.help} was {old:.3g}{metric.unit} and is {new:.3g}{metric.unit}"
