"""Cause search: more runs of a cell that has shown something, to tell the stage, the operator, and hints that help."""

from __future__ import annotations

from typing import Final

from pytest_torchcompile.checks import COMPARING
from pytest_torchcompile.observation import Observation
from pytest_torchcompile.oracle.diagnosis import locate_stage
from pytest_torchcompile.oracle.torch_hints import try_hints
from pytest_torchcompile.run.culprit_cell import culprit_of
from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["search_cause"]

_LOCATED: Final = {"compiles", *COMPARING}
"""Sections that say which stage of the compiler brings a difference in."""


def search_cause(run: CellTrial, seen: Observation) -> None:
    """Write what is found into the sections of the observation. Nothing is run where nothing is wrong."""
    _search_stage(run, seen)
    _try_hints(run, seen)


def _has_time_to_search(run: CellTrial) -> bool:
    """What takes more runs of the cell is tried only with cells that take little time: asked anew before each."""
    return run.compared and sum(run.seconds.values()) <= run.job.locate


def _search_stage(run: CellTrial, seen: Observation) -> None:
    """Tell the stage of the compiler that brings a difference in, and the operator where it is wanted."""
    if not _has_time_to_search(run):
        return
    stage = locate_stage(run)
    if not stage:
        return
    if run.job.culprit and run.single:
        stage["culprit"] = culprit_of(run, stage)
    backend = str(run.job.cell["backend"])
    # Of a toolkit the part that comes last is named.
    if ":" in backend and stage["backend"] not in stage.get("adds", {}):
        # As the matrix calls it: what a library makes of a user's function is called otherwise.
        stage["backend"] = backend
    for name in _LOCATED & seen.sections.keys():
        seen.sections[name]["located"] = stage


def _try_hints(run: CellTrial, seen: Observation) -> None:
    """Try what torch advises against graph breaks, if there are more than the cell allows."""
    breaks = seen.sections.get("graph_breaks", {}).get("graph_breaks", ())
    is_broken = run.single and len(breaks) > run.job.limits.get("graph_breaks", 0)
    if is_broken and _has_time_to_search(run):
        for number, came in try_hints(run, breaks, run.job.locate).items():
            breaks[number]["hint_tried"] = came
