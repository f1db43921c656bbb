"""The culprit of a cell: looked for in a process of its own, which a compiler may end. No torch at its top."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.culprit.culprit_record import Culprit
from pytest_torchcompile.oracle.diagnosis import blamed_backend, first_stage
from pytest_torchcompile.oracle.discrepancies import find_discrepancies
from pytest_torchcompile.run.job_process import ask_process

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["culprit_of", "one_sentence"]

_PROCESS: Final = "pytest_torchcompile.run.culprit_process"
_GRACE: Final = 30.0
"""Seconds that the process gets beyond its budget: to start, and for the compile that it is in."""


def culprit_of(run: CellTrial, located: Mapping[str, Any]) -> dict[str, Any]:
    """Find the culprit of a cell that has run and shown something, as plain data.

    ``located``: which stage brings it in. What the cell may still take of its time-out is the most that is spent.
    """
    from pytest_torchcompile.culprit.graph_trial import signs_of

    backend = blamed_backend(located)
    if not backend:
        first = first_stage(located)
        return Culprit(first, why_not=f"no compiler has a part in it, look at {located['adds'][first]}").to_dict()
    kinds = [each.kind for each in find_discrepancies([*run.leaves, *run.trained])]
    error = run.compiled.error
    signs = signs_of(kinds, error.type if error else "")
    # Twice the grace: once for the other process to answer, once for this one to end.
    left = run.job.timeout - sum(run.seconds.values()) - 2 * _GRACE
    seconds = min(run.job.culprit, left)
    if seconds <= 0:
        return Culprit(backend, why_not="nothing is left of the cell's time: raise --compile-timeout").to_dict()
    also = {"backend": backend, "signs": sorted(signs), "seconds": seconds}
    with run.phase("culprit"):
        found, why = ask_process(_PROCESS, run.job, also, seconds=seconds + _GRACE)
    if found is None:
        return Culprit(backend, why_not=one_sentence(why)).to_dict()
    return found


def one_sentence(why: str) -> str:
    """How a process ended, and of what it said the last line."""
    first, *others = why.strip().splitlines()
    if not others:
        return first.removesuffix(":")
    return f"{first.partition(':')[0]}: {others[-1].strip()}"
