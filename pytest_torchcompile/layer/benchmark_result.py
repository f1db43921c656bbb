"""What a benchmark found: two sides, their ratio with an interval that assumes nothing of the noise. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import comb, exp, log
from statistics import median
from typing import Any

__all__ = ["LEAST_ROUNDS", "Benchmark", "Ratio", "SideFigures", "quantile", "ratio_of"]

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
    # Logarithms, so that the ratio the other way round has the inverse median.
    logs = sorted(log(one / other) for one, other in zip(ones, others, strict=True))
    k = _order_statistic(rounds)
    return Ratio(exp(median(logs)), exp(logs[k - 1]), exp(logs[rounds - k]), rounds)


def _order_statistic(rounds: int) -> int:
    """The largest k whose interval has the confidence; sums the binomial distribution up to it."""
    below, k = 0.0, 0
    while True:
        below += comb(rounds, k) / 2**rounds
        if below > (1 - CONFIDENCE) / 2:
            return k
        k += 1


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies, interpolated between the two nearest."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class SideFigures:
    """One way to run the model."""

    first_seconds: float
    """Wall seconds of the first step, compilation among them."""
    median: float
    """Seconds of a step in the steady state."""
    low: float
    high: float
    """Between them lie 8 of 10 steady steps."""
    items_per_second: float
    """Items of a batch over the median; of what, says :attr:`Benchmark.unit`."""
    peak_bytes: int
    """Memory that a step needs at its peak, beyond what was there before it."""
    kernels: int | None
    """GPU kernels of a step. On a CPU the calls of Inductor's kernels and of library ones; None where nobody counts."""

    def rows(self, unit: str) -> Iterator[tuple[str, str]]:
        """The figures in words, each with its name."""
        yield "first step", f"{self.first_seconds:.3f} s"
        yield "step, median", f"{self.median * 1e3:.3f} ms"
        yield "8 of 10 steps", f"{self.low * 1e3:.3f}-{self.high * 1e3:.3f}"
        yield f"{unit} per second", f"{self.items_per_second:.4g}"
        yield "memory of a step", f"{self.peak_bytes / 2**20:.1f} MiB"
        yield "kernels of a step", "-" if self.kernels is None else str(self.kernels)


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark found. Its text is a table."""

    eager: SideFigures
    compiled: SideFigures
    ratio: Ratio
    """Seconds of a compiled step over those of an eager one."""
    verdict: str
    """``faster``, ``slower``, ``no difference``, or ``nothing was compiled``."""
    repeats: int
    """Steps in one timing."""
    compiles: int
    cached: int
    """Compiles that a compile cache served, at least in part: the first step says little about an empty cache then."""
    recompiles: int
    """After the first step."""
    late_compiles: int
    """Compiles in the timed rounds: the steady state was none."""
    memory_source: str
    """How memory was read: ``cuda``, ``rss`` or ``maxrss``."""
    unit: str = "items"
    """What is counted in a second: ``tokens`` of a batch of token ids, else ``items``."""
    enabled: bool = True
    """Was the second side to be compiled? Else eager was timed beside eager."""

    @property
    def speedup(self) -> float:
        """How many times as fast compiled is."""
        return 1 / self.ratio.value

    @property
    def pays_after(self) -> int | None:
        """Steps until compiling has paid for itself; None if it never does."""
        saved = self.eager.median - self.compiled.median
        if self.verdict != "faster" or saved <= 0:
            return None
        # The first step of a warm cache may be faster than eager's.
        cost = max(0.0, self.compiled.first_seconds - self.eager.first_seconds)
        return int(cost / saved) + 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"speedup": self.speedup, "pays_after": self.pays_after}

    def __str__(self) -> str:
        ratio, what = self.ratio, self.verdict
        if not self.enabled:
            what = f"not enabled, so both sides are eager: {self.verdict}"
        lines = [
            f"{what}: {self.speedup:.2f} times as fast compiled (99 % interval {1 / ratio.high:.2f} to "
            f"{1 / ratio.low:.2f}, {ratio.rounds} rounds, {self.repeats} step(s) a timing)",
            f"{'':20}{'eager':>14}{'compiled':>14}",
        ]
        for (name, eager), (_, compiled) in zip(self.eager.rows(self.unit), self.compiled.rows(self.unit), strict=True):
            lines.append(f"{name:20}{eager:>14}{compiled:>14}")
        lines.append("; ".join(self._counts()))
        return "\n".join(lines)

    def _counts(self) -> Iterator[str]:
        yield f"{self.compiles} compile(s), {self.cached} of them from a cache, {self.recompiles} recompile(s)"
        if self.late_compiles:
            yield f"{self.late_compiles} in the timed rounds"
        if self.pays_after:
            yield f"compiling pays after {self.pays_after} steps"
