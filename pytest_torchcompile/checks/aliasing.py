"""aliasing: outputs share memory with inputs, parameters, buffers and each other exactly where eager's do.

Also with outputs that somebody still holds when the model is called again: a result that is overwritten later was
right when it was compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.numerics import judge_leaves, numerics
from pytest_torchcompile.checks.protocol import Check, unjudged
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.oracle.discrepancies import NOT_HELD

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["CHECK"]


def measure(run: Trial) -> dict[str, Any]:
    """Everything that was compared in the sharing of memory."""
    found = numerics(run, [(label, leaf) for label, leaf in run.leaves if leaf.kind == "alias"])
    if run.replayed:
        found["notes"] = [*found["notes"], NOT_HELD]
    return found


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; takes no limits."""
    yield from unjudged(section) or judge_leaves(section, "output")


CHECK = Check("aliasing", measure, judge)
