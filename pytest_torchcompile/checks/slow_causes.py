"""Slow causes: why a model is not faster compiled, in one sentence with place and remedy. Pure, from a stored section.

Each cause has evidence: where the time of a profiled step on a CPU went, kernels counted on both sides, and what ran
outside of compiled graphs. Of several the one that takes most of the step is told; without evidence nothing is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["slow_cause"]

COVERED: Final = 0.9
"""With a smaller share of operator calls in graphs, little was compiled."""
MUCH_GUARDING: Final = 0.15
MUCH_LIBRARY: Final = 0.5
MUCH_PYTHON: Final = 0.5
SAME_KERNELS: Final = 0.95
"""From this share of eager's kernels on, nothing to speak of was fused."""
NAMED: Final = 3


@dataclass(frozen=True)
class _Cause:
    """One possible cause."""

    share: float
    """Of the step, that it explains."""
    text: str


def slow_cause(section: Mapping[str, Any]) -> str:
    """The first cause of a section of `worth` that is slower or no different; empty where none is known."""
    if section["verdict"] not in ("slower", "no difference") or not section.get("profile"):
        return ""
    causes = [*_little_compiled(section), *_guards(section), *_python(section), *_same_kernels(section)]
    if not causes:
        return ""
    return max(causes, key=_share_of).text


def _share_of(cause: _Cause) -> float:
    return cause.share


def _part(section: Mapping[str, Any], name: str) -> float:
    """The share of a part of the profiled step."""
    profile = section["profile"]
    seconds = profile["seconds"]
    return float(profile[name] / seconds) if seconds else 0.0


def _little_compiled(section: Mapping[str, Any]) -> Iterator[_Cause]:
    coverage = section.get("coverage")
    if coverage is None or coverage >= COVERED:
        return
    place, remedy = "", "see the check `compiles` for what stayed outside"
    if breaks := section.get("breaks"):
        first = breaks[0]
        place = f"; the first graph break is at {first['file']}:{first['line']}"
        remedy = "move what breaks the graph out of forward, as the check `graph_breaks` says"
    outside = _part(section, "operators") + _part(section, "python")
    yield _Cause(outside, f"{1 - coverage:.0%} of the operator calls run outside of compiled graphs{place}: {remedy}")


def _guards(section: Mapping[str, Any]) -> Iterator[_Cause]:
    share = _part(section, "guards")
    if share >= MUCH_GUARDING:
        seconds = section["profile"]["guards"]
        yield _Cause(share, f"Dynamo's guards take {share:.0%} of a compiled step ({seconds * 1e6:.0f} µs): the step "
                            "is too short for them, so compile a larger part at once, or give it larger batches")


def _python(section: Mapping[str, Any]) -> Iterator[_Cause]:
    share = _part(section, "python")
    if share < MUCH_PYTHON:
        return
    place = ""
    if breaks := section.get("breaks"):
        place = f", the first graph break being at {breaks[0]['file']}:{breaks[0]['line']}"
    yield _Cause(share, f"{share:.0%} of a compiled step passes in Python, outside of graphs and operators{place}: "
                        "take prints, `.item()` and loading out of the step")


def _same_kernels(section: Mapping[str, Any]) -> Iterator[_Cause]:
    profile = section["profile"]
    library, kernels_share = _part(section, "library"), section.get("kernels_share")
    if kernels_share is not None and kernels_share >= SAME_KERNELS:
        eager, compiled = section["sides"]["eager"]["kernels"], section["sides"]["compiled"]["kernels"]
        inside = library + _part(section, "generated")
        yield _Cause(inside, f"a compiled step runs {compiled} kernels and an eager one {eager}, so nothing was fused: "
                             "try the backend inductor, or leave the model to eager")
    elif library >= MUCH_LIBRARY:
        names = ", ".join(f"{calls} x {name}" for name, calls in list(profile["library_calls"].items())[:NAMED])
        yield _Cause(library, f"{library:.0%} of a compiled step is library calls that eager makes too ({names}): only "
                              "the rest can be fused")
