"""Step evidence: what a section of `worth` tells of a compiled step, as shares of it; a cause is told from these."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pytest_torchcompile.gauges.library_operators import is_custom

__all__ = [
    "MUCH_CALLING", "MUCH_GUARDING", "SlowCause", "called_names", "custom_share", "first_break", "gpu_share",
    "kernel_time", "library_share", "mostly_outside", "part_of_step", "roof_of_step", "roof_share", "share_of_calls",
]

MOSTLY_OUTSIDE: Final = 0.5
"""With a smaller share of operator calls in graphs, what breaks leave to eager is why there are as many launches."""
MUCH_GUARDING: Final = 0.15
MUCH_CALLING: Final = 1 / 3
MOST_OF_ROOF: Final = 1.25
"""Peaks and steps are measured as well as this. A step with more of its roof shows that the roof is not its own."""


@dataclass(frozen=True)
class SlowCause:
    """One possible cause."""

    kind: str
    """``coverage``, ``recompiles``, ``fusion``, ``replaced``, ``launches``, ``roof`` or ``host``."""
    share: float
    """Of the step, that it explains."""
    text: str
    """What it is, where, and what to do."""


def mostly_outside(section: Mapping[str, Any]) -> bool:
    """Whether most operators run eagerly; so it is taken to be where it was not measured."""
    coverage = section.get("coverage")
    return coverage is None or float(coverage) < MOSTLY_OUTSIDE


def part_of_step(section: Mapping[str, Any], name: str) -> float:
    """The share of a part of the profiled step; on a GPU of the time that this one waits for the host."""
    profile = section["profile"]
    seconds = profile["seconds"]
    return float(profile[name] / seconds) * _waiting_share(section) if seconds else 0.0


def gpu_share(section: Mapping[str, Any]) -> float | None:
    """The share of a compiled step in which the GPU works; None without a GPU.

    Kernels are timed in one step under the profiler, which waits before it, and the step in rows of many without: a GPU
    that never waits may come out some hundredths above 1, because its caches and clocks were cold. That counts as 1.
    """
    share = kernel_time(section)
    return None if share is None else min(1.0, share)


def kernel_time(section: Mapping[str, Any]) -> float | None:
    """The time of a profiled step's kernels over that of a timed step, as measured; None without a GPU."""
    launched = (section.get("launches") or {}).get("compiled")
    if not launched:
        return None
    seconds = section["sides"]["compiled"]["low"]
    return float(launched["busy_seconds"]) / seconds if seconds else 0.0


def _waiting_share(section: Mapping[str, Any]) -> float:
    busy = gpu_share(section)
    return 1.0 if busy is None else 1.0 - busy


def roof_share(roof: Mapping[str, Any] | None) -> float | None:
    """How near a compiled step comes to the least time that its machine needs; None where that is not known.

    A step that beats that time by more than measurement does has none: what it reads lies in caches, which are faster
    than memory, or less was moved than was counted.
    """
    if not roof or roof["share"] > MOST_OF_ROOF:
        return None
    return min(1.0, float(roof["share"]))


def roof_of_step(section: Mapping[str, Any]) -> float:
    """The same of a section; 0 where it is not known."""
    return roof_share(section.get("roof")) or 0.0


def first_break(section: Mapping[str, Any]) -> str:
    """``file:line`` of the first graph break; empty without one."""
    breaks = section.get("breaks")
    return f"{breaks[0]['file']}:{breaks[0]['line']}" if breaks else ""


def library_share(section: Mapping[str, Any]) -> float:
    """The share of library kernels in a compiled step: on a GPU of what runs there."""
    busy = gpu_share(section)
    if busy is None:
        return part_of_step(section, "library")
    launched = section["launches"]["compiled"]
    if not launched["busy_seconds"]:
        return 0.0
    return busy * (1 - float(launched["generated_seconds"] / launched["busy_seconds"]))


def share_of_calls(section: Mapping[str, Any], names: Collection[str]) -> float:
    """The share of a compiled step that passes in calls of these operators out of graphs; 0 where it was not measured.

    On a GPU by what the host takes to call them: of what runs there nobody knows which operator began it.
    """
    seconds = section["profile"].get("library_seconds") or {}
    library = section["profile"]["library"]
    chosen = sum(float(seconds[name]) for name in names if name in seconds)
    return library_share(section) * min(1.0, chosen / library) if library else 0.0


def called_names(section: Mapping[str, Any]) -> list[str]:
    """Operators that compiled graphs call in a step; none where the profile does not tell."""
    return list(section["profile"].get("library_calls") or ())


def custom_share(section: Mapping[str, Any]) -> float:
    """The share of a compiled step that passes in custom operators, which the compiler does not look into."""
    return share_of_calls(section, list(filter(is_custom, called_names(section))))
