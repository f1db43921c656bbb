"""Metrics: the numbers of a cell that a policy may limit and that a baseline is compared in. Read from observations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from pytest_torchcompile.checks import CHECKS, Column
from pytest_torchcompile.ledger.records import SILENT

__all__ = ["METRICS", "Metric", "Sections", "metric_spread"]

Sections: TypeAlias = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Metric:
    """One number of a cell."""

    kind: Literal["min", "max"]
    """``max``: a policy says how large it may be; ``min``: how small."""
    whole: bool
    """Is it a count? Counts are exact, so they are compared exactly."""
    help: str
    read: Callable[[Sections], float | None]
    """None: not measured. May raise KeyError, TypeError, ... for sections of another version."""
    unit: str = ""


def _count_reader(section: str, key: str) -> Callable[[Sections], float | None]:
    """Reads a count, or how many a list holds."""
    def read_count(sections: Sections) -> float | None:
        if section not in sections:
            return None
        value = sections[section][key]
        if isinstance(value, (list, tuple)):
            return len(value)
        # Anything else is of a section of another version.
        return value if isinstance(value, int) else None

    return read_count


def _silent_eager(sections: Sections) -> float | None:
    if "compiles" not in sections:
        return None
    return sum(frame["kind"] in SILENT for frame in sections["compiles"]["eager_frames"])


def _compile_seconds(sections: Sections) -> float | None:
    if "compiles" not in sections:
        return None
    # Exact: the sum must not depend on the order of the compiles, for reports are compared.
    return math.fsum(each["seconds"] for each in sections["compiles"]["compiles"])


def _guard_microseconds(sections: Sections) -> float | None:
    """None where torch told it of no compile: then it was not measured."""
    if "compiles" not in sections:
        return None
    # Zero is told only where torch gave no figure, for no set of guards takes no time at all.
    return sum(each["guard_microseconds"] for each in sections["compiles"]["compiles"]) or None


def _step_ms(sections: Sections) -> float | None:
    sides = sections.get("worth", {}).get("sides")
    # The section has seconds.
    return None if sides is None else float(1e3 * sides["compiled"]["median"])


def _kernel_count(sections: Sections) -> float | None:
    if "kernels" not in sections:
        return None
    return sum(len(graph["generated"]) for graph in sections["kernels"]["graphs"])


def _shipped_routes(sections: Sections) -> float | None:
    if "artifacts" not in sections:
        return None
    without_problems = 0
    for route in sections["artifacts"]["routes"]:
        was_shipped = not route["skipped"] and not route["refused"]
        if was_shipped and not route["problems"]:
            without_problems += 1
    return without_problems


def _cache_misses(sections: Sections) -> float | None:
    """None where no route that keeps graphs has shipped any: nothing was counted."""
    if "artifacts" not in sections:
        return None
    misses = None
    for route in sections["artifacts"]["routes"]:
        if route["cached"] and not route["refused"]:
            misses = (misses or 0) + route["misses"]
    return misses


def _number_reader(key: str) -> Callable[[Sections], float | None]:
    """Reads a number that a section holds at its top, whichever section it is."""
    def read_number(sections: Sections) -> float | None:
        for section in sections.values():
            if key not in section:
                continue
            value = section[key]
            # True and False are ints to Python.
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return value
        return None

    return read_number


def metric_spread(sections: Sections, name: str) -> float | None:
    """One standard deviation of repetitions of the metric, where its section tells it by ``NAME_spread``."""
    return _number_reader(f"{name}_spread")(sections)


_READERS: Final[dict[str, Callable[[Sections], float | None]]] = {
    "silent_eager": _silent_eager, "compile_seconds": _compile_seconds, "kernels": _kernel_count,
    "guard_microseconds": _guard_microseconds, "step_ms": _step_ms, "shipped_routes": _shipped_routes,
    "cache_misses": _cache_misses,
}
"""How the columns are read that are neither a number at the top of a section nor the length of a list there."""


def _reader_of(check: str, column: Column) -> Callable[[Sections], float | None]:
    if column.name in _READERS:
        return _READERS[column.name]
    return _count_reader(check, column.name) if column.whole else _number_reader(column.name)


def _metrics_of_checks() -> Iterator[tuple[str, Metric]]:
    for check, entry in CHECKS.items():
        for column in entry.columns:
            yield column.name, Metric(column.kind, column.whole, column.help, _reader_of(check, column), column.unit)


METRICS: Final[dict[str, Metric]] = dict(_metrics_of_checks())
"""By the names of the columns that the checks' records have."""
