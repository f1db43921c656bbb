"""Metrics: the numbers of a cell that a policy may limit and that a baseline is compared in. Read from observations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


def _count(section: str, key: str) -> Callable[[Sections], float | None]:
    """A count, or how many a list holds."""
    def read(sections: Sections) -> float | None:
        if section not in sections:
            return None
        found = sections[section][key]
        if isinstance(found, (list, tuple)):
            return len(found)
        return found if isinstance(found, int) else None  # else a section of another version

    return read


def _silent(sections: Sections) -> float | None:
    if "compiles" not in sections:
        return None
    return sum(frame["kind"] in SILENT for frame in sections["compiles"]["eager_frames"])


def _compile_seconds(sections: Sections) -> float | None:
    if "compiles" not in sections:
        return None
    return math.fsum(each["seconds"] for each in sections["compiles"]["compiles"])


def _kernels(sections: Sections) -> float | None:
    if "kernels" not in sections:
        return None
    return sum(len(graph["generated"]) for graph in sections["kernels"]["graphs"])


def _top(key: str) -> Callable[[Sections], float | None]:
    """A number that a section holds at its top, whichever section it is."""
    def read(sections: Sections) -> float | None:
        found = (section[key] for section in sections.values() if key in section)
        return next((n for n in found if isinstance(n, (int, float)) and not isinstance(n, bool)), None)

    return read


def metric_spread(sections: Sections, name: str) -> float | None:
    """One standard deviation of repetitions of the metric, where its section tells it by ``NAME_spread``."""
    return _top(f"{name}_spread")(sections)


_READERS: Final[dict[str, Callable[[Sections], float | None]]] = {
    "silent_eager": _silent, "compile_seconds": _compile_seconds, "kernels": _kernels,
}
"""How the columns are read that are neither a number at the top of a section nor the length of a list there."""


def _reader(check: str, column: Column) -> Callable[[Sections], float | None]:
    if column.name in _READERS:
        return _READERS[column.name]
    return _count(check, column.name) if column.whole else _top(column.name)


METRICS: Final[dict[str, Metric]] = {
    column.name: Metric(column.kind, column.whole, column.help, _reader(check, column), column.unit)
    for check, entry in CHECKS.items() for column in entry.columns
}
"""By the names of the columns that the checks' records have."""
