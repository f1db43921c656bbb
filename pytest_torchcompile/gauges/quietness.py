"""Quietness: is this machine quiet enough for seconds that it tells? One rule, for whatever is timed. No torch.

The same steps on the same batch are timed some times in a row, which is a round. On a quiet machine the longest of a
round is hardly longer than the shortest. Where it is in most rounds, others are at work, and seconds are too long.

A load that is steady makes all timings alike. It is seen by what the processors did that this process did not.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

__all__ = ["LEAST_SECONDS", "TURNS", "OthersLoad", "is_quiet", "unrest_of", "unrest_of_round", "watch_others"]

QUIET: Final = 1.3
"""On a quiet machine the longest of a round's timings is at most so many times the shortest, in most rounds."""
TURNS: Final = 3
"""Timings in a round."""
LEAST_SECONDS: Final = 2e-3
"""A timing lasts at least this long: of microseconds the clock and the processor's own turns are a large part."""


MUCH_LOAD: Final = 0.25
"""Processors that others keep busy; with fewer a machine counts as idle beside."""
_STAT: Final = Path("/proc/stat")
_BUSY_FIELDS: Final = (0, 1, 2, 5, 6, 7)
"""Of the line ``cpu`` (man 5 proc_stat): user, nice, system, irq, softirq, steal. What guests take is in user."""


@dataclass
class OthersLoad:
    """What other processes did while a block ran."""

    processors: float | None = None
    """As many they kept busy on average; None where this system does not tell."""
    of: int = 0
    """Processors of this machine."""

    @property
    def told(self) -> str:
        """In words; empty where they did next to nothing, or nobody knows.

        >>> OthersLoad(1.5, 4).told, OthersLoad(0.1, 4).told, OthersLoad().told
        ('other processes kept 1.5 of 4 processors busy', '', '')
        """
        if self.processors is None or self.processors < MUCH_LOAD:
            return ""
        return f"other processes kept {self.processors:.1f} of {self.of} processors busy"


@contextlib.contextmanager
def watch_others() -> Iterator[OthersLoad]:
    """Watch what other processes do while the block runs, by ``/proc/stat``; what it gives is filled at the end."""
    load = OthersLoad(of=os.cpu_count() or 0)
    before, own_before, begun = _busy_seconds(), time.process_time(), time.perf_counter()
    yield load
    after, lasted = _busy_seconds(), time.perf_counter() - begun
    if before is not None and after is not None and lasted > 0:
        others = (after - before) - (time.process_time() - own_before)
        load.processors = max(0.0, others / lasted)


def _busy_seconds() -> float | None:
    """Seconds that all processors were busy since this machine started; None where that is not told."""
    if not hasattr(os, "sysconf"):
        return None
    try:
        _name, *fields = _STAT.read_text().partition("\n")[0].split()
        ticks = [int(fields[number]) for number in _BUSY_FIELDS]
    except (OSError, ValueError, IndexError):
        return None
    return float(sum(ticks)) / int(os.sysconf("SC_CLK_TCK"))


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
