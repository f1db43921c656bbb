"""Quietness: is this machine quiet enough for seconds that it tells? One rule, for whatever is timed. No torch.

The same steps on the same batch are timed some times in a row, which is a round. On a quiet machine the longest of a
round is hardly longer than the shortest. Where it is in most rounds, others are at work, and seconds are too long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

__all__ = ["LEAST_SECONDS", "TURNS", "is_quiet", "unrest_of", "unrest_of_round"]

QUIET: Final = 1.3
"""On a quiet machine the longest of a round's timings is at most so many times the shortest, in most rounds."""
TURNS: Final = 3
"""Timings in a round."""
LEAST_SECONDS: Final = 2e-3
"""A timing lasts at least this long: of microseconds the clock and the processor's own turns are a large part."""


def unrest_of_round(timings: Sequence[float]) -> float:
    """How many times its shortest timing the longest of a round is; seconds, all above 0."""
    return max(timings) / min(timings)


def unrest_of(rounds: Iterable[float]) -> float:
    """The median over rounds; 1 where there are none."""
    return median([*rounds] or [1.0])


def is_quiet(unrest: float) -> bool:
    """Whether seconds that were timed meanwhile can be told without a warning.

    >>> is_quiet(1.1), is_quiet(2.5)
    (True, False)
    """
    return unrest <= QUIET
