"""graph_breaks: no more places where a graph ends early than the matrix allows (default: none)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.protocol import Check
from pytest_torchcompile.checks.severity import EMPTY, RAISED
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.runner import Run

__all__ = ["CHECK"]


def measure(run: Run) -> dict[str, Any]:
    """The distinct places in user code where a graph broke."""
    error = run.compiled.error
    return {"raised": error.type if error else None, "graphs": len(run.compiled.seen["graphs"]),
            "graph_breaks": run.compiled.seen["graph_breaks"]}


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``graph_breaks``, the largest number of places allowed."""
    breaks, most = section["graph_breaks"], limits.get("graph_breaks", 0)
    if len(breaks) > most:
        for found in breaks:
            yield Problem(
                f"graph break ({len(breaks)} place(s), {most:g} allowed): {found['reason'].splitlines()[0]}",
                evidence=f"{found['file']}:{found['line']} ({found['owner']})"
                         + (f"  {found['gb_id']}" if found.get("gb_id") else ""),
                hint=found.get("hint") or "", file=found["file"], line=found["line"],
            )
    elif section["raised"] or not section["graphs"]:
        # No graph, no break: silence about a run that compiled nothing would be a lie.
        why = f"{RAISED} {section['raised']}" if section["raised"] else "no graph was compiled"
        yield Problem(f"{EMPTY}: {why}", hint="see the check `compiles` of this cell")


CHECK = Check("graph_breaks", measure, judge)
