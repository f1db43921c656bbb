"""What a benchmark found: two sides, their ratio with an interval that assumes nothing of the noise. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import comb, exp, log
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.ledger.records import OverLimit

if TYPE_CHECKING:
    from pytest_torchcompile.gauges.kernels import Launches
    from pytest_torchcompile.gauges.step_parts import StepParts
    from pytest_torchcompile.gauges.step_profile import StepProfile
    from pytest_torchcompile.gauges.step_work import StepWork

__all__ = ["LEAST_ROUNDS", "NOTHING", "NOT_TOLD", "Benchmark", "Ratio", "SideFigures", "came_from_cache", "pays_after",
           "quantile", "ratio_of", "speed_text"]

NOT_TOLD: Final = "could not be told"
"""The verdict of a machine that is not quiet enough."""
NOTHING: Final = "nothing was compiled"
"""The verdict where no compiled code ran in the last steps that were timed."""
CONFIDENCE = 0.99
TELLING: Final = 1.25
"""Where this ratio is still possible, nobody can say that there is no difference."""
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

    @property
    def speedup(self) -> float:
        """How many times as fast the one is."""
        return 1 / self.value

    @property
    def speedup_interval(self) -> tuple[float, float]:
        """The lowest and the highest that the speed-up may be, with the same confidence."""
        return 1 / self.high, 1 / self.low

    @property
    def width(self) -> float:
        """How many times the upper end is the lower one: 1 on a machine without noise."""
        return self.high / self.low

    def widened(self, factor: float) -> Ratio:
        """The same with both ends of the interval so many times as far off."""
        return Ratio(self.value, self.low / factor, self.high * factor, self.rounds)

    def differs(self, least: float) -> bool:
        """Whether all of the interval is on one side of 1, and the value at least ``least`` away from it."""
        return (self.low > 1 or self.high < 1) and abs(self.value - 1) >= least

    def agrees(self, other: Ratio, least: float) -> bool:
        """Whether both differ from 1, on the same side."""
        return self.differs(least) and other.differs(least) and (self.value < 1) == (other.value < 1)

    def verdict(self, least: float, confirmed: bool) -> str:
        """``faster``, ``slower``, ``no difference`` or ``could not be told``, of the side that is divided.

        It could not be told where more than :data:`TELLING` is possible on one side of 1: then there may be a
        difference that matters, and this machine is too noisy to show it.

        Args:
            least: As for :meth:`differs`.
            confirmed: A difference was seen in two series of rounds, each by itself.
        """
        if confirmed and self.differs(least):
            return "faster" if self.value < 1 else "slower"
        if self.low * TELLING < 1 or self.high > TELLING:
            return NOT_TOLD
        return "no difference"


def speed_text(speedup: float, interval: Sequence[float], more: str = "") -> str:
    """How fast the compiled side is, with the interval of that (lowest, highest); ``more`` stands in the brackets.

    >>> speed_text(1.5, (1.4, 1.62))
    '1.50 times as fast compiled (99 % interval 1.40 to 1.62)'
    """
    low, high = interval
    return f"{speedup:.2f} times as fast compiled (99 % interval {low:.2f} to {high:.2f}{more})"


def came_from_cache(answers: Iterable[str]) -> bool:
    """Whether a compile was served by a cache, by what the caches answered (``fx hit``, ``aot miss``, ...)."""
    return any("hit" in answer for answer in answers)


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


def pays_after(cost: float, eager: float, compiled: float) -> int | None:
    """Steps after which ``cost`` seconds are won back, by seconds of a step; None if they never are."""
    saved = eager - compiled
    if saved <= 0:
        return None
    return int(cost / saved) + 1


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
    """Kernels of a step. On a CPU the calls of Inductor's kernels and of operators that compute
    (:mod:`~pytest_torchcompile.gauges.step_profile`); None where it was not asked."""

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
    """``faster``, ``slower``, ``no difference``, ``could not be told`` or ``nothing was compiled``."""
    repeats: int
    """Steps in one timing of eager; a timing of the other side is about as long."""
    compiles: int
    cached: int
    """Compiles that a compile cache served, at least in part: the first step says little about an empty cache then."""
    recompiles: int
    """After the first step."""
    late_compiles: int
    """Compiles in the timed rounds: the steady state was none."""
    memory_source: str
    """How memory was read: ``cuda``, ``rss``, ``maxrss``, or ``unknown``."""
    unit: str = "items"
    """What is counted in a second: ``tokens`` of a batch of token ids, else ``items``."""
    enabled: bool = True
    """Was the second side to be compiled? Else eager was timed beside eager."""
    profile: StepProfile | None = None
    """Where the time of the CPU goes in a compiled step."""
    launches: dict[str, Launches] = field(default_factory=dict)
    """On a GPU what a step of each side, ``eager`` and ``compiled``, does there."""
    work: StepWork | None = None
    """What an eager step computes and moves; None for a model that torch cannot look into."""
    parts: StepParts | None = None
    """The same step in parts, the model and the rest; None where ``work`` is."""
    late: list[dict[str, Any]] = field(default_factory=list)
    """The compiles in the timed rounds (:class:`~pytest_torchcompile.ledger.records.Compile`)."""
    over_limit: list[OverLimit] = field(default_factory=list)
    """Functions that hit Dynamo's recompile limit: from then on they ran eagerly."""
    coverage: float | None = None
    """The share of the operator calls of a timed forward pass that ran in graphs; None where it makes none."""
    eager_operators: tuple[str, ...] = ()
    """All operators that an eager step calls, by name (``aten::mm``)."""
    others_load: str = ""
    """What other processes did while steps were timed, in words; empty where that was next to nothing, or unknown."""
    not_compiled: str = ""
    """Where nothing ran compiled: why, with the line and what to do."""

    @property
    def speedup(self) -> float:
        """How many times as fast compiled is."""
        return self.ratio.speedup

    @property
    def pays_after(self) -> int | None:
        """Steps until compiling has paid for itself; None if it never does."""
        if self.verdict != "faster":
            return None
        # The first step of a warm cache may be faster than eager's.
        cost = max(0.0, self.compiled.first_seconds - self.eager.first_seconds)
        return pays_after(cost, self.eager.median, self.compiled.median)

    @property
    def kernels_share(self) -> float | None:
        """Kernels of a compiled step over those of an eager one; None where they were not counted."""
        if not self.eager.kernels or self.compiled.kernels is None:
            return None
        return self.compiled.kernels / self.eager.kernels

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        derived = {"speedup": self.speedup, "pays_after": self.pays_after, "kernels_share": self.kernels_share}
        return asdict(self) | derived

    def __str__(self) -> str:
        ratio, what = self.ratio, self.verdict
        if not self.enabled:
            what = f"not enabled, so both sides are eager: {self.verdict}"
        timed = f", {ratio.rounds} rounds, {self.repeats} step(s) a timing"
        lines = [
            f"{what}: {speed_text(ratio.speedup, ratio.speedup_interval, timed)}",
            f"{'':20}{'eager':>14}{'compiled':>14}",
        ]
        for (name, eager), (_, compiled) in zip(self.eager.rows(self.unit), self.compiled.rows(self.unit), strict=True):
            lines.append(f"{name:20}{eager:>14}{compiled:>14}")
        lines.append("; ".join(self._counts()))
        return "\n".join(lines)

    def _counts(self) -> Iterator[str]:
        yield f"{self.compiles} compile(s), {self.cached} of them from a cache, {self.recompiles} recompile(s)"
        if self.not_compiled:
            yield self.not_compiled
        if self.late_compiles:
            yield f"{self.late_compiles} in the timed rounds"
        for over in self.over_limit:
            yield over.told(None if self.coverage is None else 1 - self.coverage)
        if self.pays_after:
            by_cache = f", with {self.cached} of {self.compiles} compiles from a cache" if self.cached else ""
            yield f"compiling pays after {self.pays_after} steps{by_cache}"
        if self.cached:
            yield ("a cache served what was compiled, so the compiled first step is no cold one: with empty caches it "
                   "takes longer, and pays later")
        if self.others_load:
            yield f"{self.others_load}: seconds are too long, and both sides may suffer unequally"
