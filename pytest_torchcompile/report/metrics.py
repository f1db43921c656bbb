"""Metrics: the numbers of a cell that a policy may limit and that a baseline is compared in. Read from observations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from pytest_torchcompile.instruments.records import SILENT

__all__ = ["METRICS", "Metric", "Sections", "spread"]

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
    return lambda sections: len(sections[section][key]) if section in sections else None


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


def spread(sections: Sections, name: str) -> float | None:
    """One standard deviation of repetitions of the metric, where its section tells it by ``NAME_spread``."""
    return _top(f"{name}_spread")(sections)


METRICS: Final[dict[str, Metric]] = {
    "graph_breaks": Metric("max", True, "places where a graph ends early", _count("graph_breaks", "graph_breaks")),
    "recompiles": Metric("max", True, "recompiles in the cell's run", _count("recompiles", "recompiles")),
    "silent_eager": Metric("max", True, "frames that silently ran eagerly", _silent),
    "graphs": Metric("max", True, "graphs that the backend compiled", _count("compiles", "graphs")),
    "kernels": Metric("max", True, "kernels that Inductor generated", _kernels),
    "compile_seconds": Metric("max", False, "seconds of all compiles of the cell", _compile_seconds, " s"),
    "speedup": Metric("min", False, "eager time over compiled time", _top("speedup")),
    "memory_mib": Metric("max", False, "peak memory of a call", _top("memory_mib"), " MiB"),
}
