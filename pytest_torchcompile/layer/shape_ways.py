"""Shape ways: four ways to compile for sizes that vary, what each cost over a traffic, and which wins. Plain data.

``static`` compiles for each size, ``auto`` for the first and then for any, ``dynamic`` for any from the start.
``buckets`` pads each size to one of a few, and compiles for those. Eager, which compiles nothing, is what each is held
against.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pytest_torchcompile.layer.benchmark_result import pays_after
from pytest_torchcompile.quantity import count, readable_seconds

__all__ = ["WAYS", "Reign", "ShapeExperiment", "Way", "default_buckets"]

WAYS: Final = ("static", "auto", "dynamic", "buckets")
EAGER: Final = "eager"
FORMAT: Final = 1
"""Of the JSON; a number more where a key changes its meaning."""


@dataclass(frozen=True)
class Way:
    """One way, over all sizes; seconds are of one step."""

    name: str
    compiles: int
    cold_seconds: float
    """Of all compiles, with a cache of its own that was empty."""
    steady: dict[int, float]
    """Size to seconds of a warm step."""
    eager_sizes: tuple[int, ...] = ()
    """Sizes for which nothing ran compiled: torch gives a function up that was compiled too often."""
    late_compiles: int = 0
    """Compiles after each size was met: there is no steady state."""
    error: str = ""
    """Why it could not be tried."""
    least: dict[int, float] = field(default_factory=dict)
    """The lower end of the 99 % interval of :attr:`steady`; empty where it was not measured."""
    most: dict[int, float] = field(default_factory=dict)
    """The upper end."""
    recompiled: str = ""
    """The guard that kept failing, its line and what to do; empty where none did, or it is so by design."""


@dataclass(frozen=True)
class Reign:
    """From how many calls on a way is the cheapest."""

    since: int
    way: str


@dataclass(frozen=True)
class ShapeExperiment:
    """All ways of one model."""

    model: str
    dim: str
    """The name of the size that varies."""
    backend: str
    phase: str
    torch: str
    traffic: dict[int, int]
    """Size to calls, in the order in which they come first."""
    buckets: tuple[int, ...]
    eager: dict[int, float]
    """Size to seconds of an eager step."""
    ways: tuple[Way, ...] = field(default_factory=tuple)

    @property
    def calls(self) -> int:
        """All of the traffic."""
        return sum(self.traffic.values())

    @property
    def padding_waste(self) -> float:
        """The share of the padded elements that are padding, over the traffic."""
        real = sum(size * calls for size, calls in self.traffic.items())
        padded = sum(bucket_of(size, self.buckets) * calls for size, calls in self.traffic.items())
        return 1 - real / padded if padded else 0.0

    @property
    def tried(self) -> list[Way]:
        """The ways that ran."""
        return [way for way in self.ways if not way.error]

    @property
    def compared(self) -> list[Way]:
        """Of these the ways that compiled something: one that did not is eager, and its figures differ by chance."""
        return [way for way in self.tried if set(self.traffic) - set(way.eager_sizes)]

    def steps_seconds(self, steady: Mapping[int, float]) -> float:
        """Of all steps of the traffic."""
        return sum(steady[size] * calls for size, calls in self.traffic.items())

    def total_seconds(self, way: Way) -> float:
        """Compiling and all steps."""
        return way.cold_seconds + self.steps_seconds(way.steady)

    def pays_after(self, way: Way) -> int | None:
        """Calls of this mix of sizes after which compiling is won back; None if it never is."""
        mean, eager = self.steps_seconds(way.steady) / self.calls, self.steps_seconds(self.eager) / self.calls
        return pays_after(way.cold_seconds, eager, mean)

    @property
    def winner(self) -> str:
        """The cheapest over the traffic, ``eager`` among them."""
        totals = {EAGER: self.steps_seconds(self.eager)}
        for way in self.compared:
            totals[way.name] = self.total_seconds(way)
        return min(totals, key=lambda name: totals[name])

    def total_range(self, way: Way) -> tuple[float, float]:
        """The least and the most that :meth:`total_seconds` may be: each size at that end of its interval."""
        least, most = way.least or way.steady, way.most or way.steady
        return way.cold_seconds + self.steps_seconds(least), way.cold_seconds + self.steps_seconds(most)

    @property
    def rivals(self) -> list[str]:
        """What this machine cannot tell from the winner: each may be as cheap over the traffic."""
        eager = self.steps_seconds(self.eager)
        ranges = {EAGER: (eager, eager)}
        for way in self.compared:
            ranges[way.name] = self.total_range(way)
        winner = self.winner
        return [name for name, (least, _) in ranges.items() if name != winner and least <= ranges[winner][1]]

    @property
    def reigns(self) -> list[Reign]:
        """The cheapest way by the number of calls, with this mix of sizes: break-even from one to the next."""
        lines = {EAGER: (0.0, self.steps_seconds(self.eager) / self.calls)}
        for way in self.compared:
            lines[way.name] = (way.cold_seconds, self.steps_seconds(way.steady) / self.calls)
        current, since = EAGER, 0
        reigns = [Reign(0, EAGER)]
        while True:
            # Who has the shorter step overtakes some time; the first who does is the next.
            overtaken: dict[str, int] = {}
            for name, (cold, step) in lines.items():
                calls = pays_after(cold - lines[current][0], lines[current][1], step)
                if calls is not None and name != current:
                    overtaken[name] = max(calls, since)
            if not overtaken:
                return reigns
            # Of two at once the one with the shorter step.
            current = min(overtaken, key=lambda name: (overtaken[name], lines[name][1]))
            since = overtaken[current]
            reigns.append(Reign(since, current))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` takes, with what follows from it."""
        derived = {
            "padding_waste": self.padding_waste, "winner": self.winner, "rivals": self.rivals,
            "reigns": [asdict(reign) for reign in self.reigns],
            "totals": {way.name: self.total_seconds(way) for way in self.tried},
        }  # fmt: skip
        return {"format": FORMAT, **asdict(self), **derived}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ShapeExperiment:
        """Read what :meth:`to_dict` made, also after a way through JSON. Raises KeyError, TypeError or ValueError."""
        ways = []
        for way in data["ways"]:
            ways.append(Way(way["name"], way["compiles"], way["cold_seconds"], _by_size(way["steady"]),
                            tuple(way["eager_sizes"]), way["late_compiles"], way["error"],
                            _by_size(way.get("least", {})), _by_size(way.get("most", {})), way.get("recompiled", "")))
        return cls(data["model"], data["dim"], data["backend"], data["phase"], data["torch"],
                   {size: int(calls) for size, calls in _by_size(data["traffic"]).items()}, tuple(data["buckets"]),
                   _by_size(data["eager"]), tuple(ways))

    # ------------------------------------------------------------------------------------------------------- in words
    @property
    def head(self) -> tuple[str, ...]:
        """The columns of :meth:`rows`."""
        sizes = " / ".join(map(str, self.traffic))
        return ("way", "compiles", "cold", f"a step of {self.dim} = {sizes}", "total", "pays after")

    def rows(self) -> Iterator[tuple[str, ...]]:
        """A row for eager and for each way."""
        eager = readable_seconds(self.steps_seconds(self.eager))
        yield (EAGER, "0", "-", self._steps(self.eager), eager, "-")
        for way in self.ways:
            if way.error:
                yield (way.name, "-", "-", way.error, "-", "-")
                continue
            pays = self.pays_after(way)
            yield (way.name, str(way.compiles), readable_seconds(way.cold_seconds), self._steps(way.steady),
                   readable_seconds(self.total_seconds(way)), "never" if pays is None else count(pays, "call"))

    def _steps(self, steady: Mapping[int, float]) -> str:
        return " / ".join(f"{steady[size] * 1e3:.3f}" for size in self.traffic) + " ms"

    def _rivals_text(self) -> str:
        if not self.rivals:
            return ""
        return f"; this machine cannot tell it from {' and '.join(self.rivals)} (their 99 % intervals overlap)"

    def sentences(self) -> Iterator[str]:
        """What follows from the figures."""
        if not self.tried:
            yield "No way could be tried, so nothing is known of what compiling costs here."
            return
        yield f"Over {count(self.calls, 'call')}: {self.winner}{self._rivals_text()}."
        yield f"By the number of calls of this mix: {_reign_text(self.reigns)}."
        named = ", ".join(map(str, self.buckets))
        yield f"Buckets {named}: {self.padding_waste:.0%} of the padded {self.dim} is padding."
        for way in self.tried:
            if way not in self.compared:
                yield (f"{way.name}: nothing ran compiled, so it says nothing; `pytest-torchcompile explain` tells "
                       "why the model is not compiled.")
            elif way.eager_sizes:
                sizes = ", ".join(map(str, way.eager_sizes))
                yield (f"{way.name}: {self.dim} = {sizes} ran eagerly, for torch compiles one function only so often "
                       "(torch._dynamo.config.recompile_limit).")
            if way.recompiled:
                yield (f"{way.name}: {count(way.compiles, 'compile')} for {count(len(self.traffic), 'size')}, because "
                       f"{way.recompiled}.")
            if way.late_compiles:
                yield f"{way.name}: {count(way.late_compiles, 'compile')} after every size was met; there is no end."


def default_buckets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Powers of two that hold the sizes.

    >>> default_buckets([8, 12, 40])
    (8, 16, 64)
    """
    return tuple(sorted({1 << max(0, size - 1).bit_length() for size in sizes}))


def bucket_of(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that a size fits into."""
    return min(bucket for bucket in buckets if bucket >= size)


def _by_size(values: Mapping[Any, Any]) -> dict[int, float]:
    # JSON has texts for keys.
    return {int(size): value for size, value in values.items()}


def _reign_text(reigns: Sequence[Reign]) -> str:
    first, *others = reigns
    return ", ".join([first.way, *(f"from {reign.since} on {reign.way}" for reign in others)])
