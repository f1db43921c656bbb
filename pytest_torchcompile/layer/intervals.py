"""Medians and what is known of them: an interval that assumes nothing about how timings are distributed. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, exp, log
from statistics import median

__all__ = ["LEAST_ROUNDS", "Ratio", "quantile", "ratio_of"]

CONFIDENCE = 0.99
LEAST_ROUNDS = 8
"""With fewer values no interval of them holds the median with that confidence: 1 - 2 * 0.5**8 = 0.992."""


@dataclass(frozen=True)
class Ratio:
    """How many times as long the one takes as the other."""

    value: float
    """Median over the rounds."""
    low: float
    high: float
    """The median lies between them with a confidence of 99 %."""
    rounds: int

    def differs(self, least: float) -> bool:
        """Whether all of the interval is on one side of 1, and the value at least ``least`` away from it."""
        return (self.low > 1 or self.high < 1) and abs(self.value - 1) >= least


def ratio_of(ones: Sequence[float], others: Sequence[float]) -> Ratio:
    """The ratio ``one / other`` of timings that were taken side by side, round by round.

    What a round shares (clock speed, other processes) cancels. The interval is that of the k-th smallest and the k-th
    largest ratio, with the largest k for which ``P(Binomial(rounds, 1/2) < k) <= 0.5 %`` (Hahn and Meeker, Statistical
    Intervals, section 5.2), so no shape of the noise is assumed, but that rounds are independent of each other.

    Raises:
        ValueError: Fewer than 8 rounds, or not as many of one as of the other.
    """
    rounds = len(ones)
    if rounds != len(others) or rounds < LEAST_ROUNDS:
        raise ValueError(f"{rounds} and {len(others)} timings; expected as many of each, and at least {LEAST_ROUNDS}")
    logs = sorted(log(one / other) for one, other in zip(ones, others, strict=True))
    k = _rank(rounds)
    return Ratio(exp(median(logs)), exp(logs[k - 1]), exp(logs[rounds - k]), rounds)


def _rank(rounds: int) -> int:
    below, k = 0.0, 0
    while (below := below + comb(rounds, k) / 2**rounds) <= (1 - CONFIDENCE) / 2:
        k += 1
    return k


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies, interpolated between the two nearest."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
