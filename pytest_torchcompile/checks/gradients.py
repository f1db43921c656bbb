"""gradients: backward through the compiled model gives the gradients that eager gives. Training cells only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.layout import is_stride
from pytest_torchcompile.checks.numerics import (
    GRADIENT,
    judge_decided,
    judge_leaves,
    judge_zero_gradients,
    numerics,
    remark,
)
from pytest_torchcompile.checks.protocol import Check, unjudged
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["CHECK"]


def measure(run: Trial) -> dict[str, Any]:
    """The gradients of parameters and inputs, and how many of eager's are not zero."""
    section = numerics(run, [(label, leaf) for label, leaf in run.leaves
                             if leaf.name.startswith(GRADIENT) and not is_stride(leaf)])
    return section | {"nonzero": sum(passed.gradients for passed in run.passed)}


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``zero_gradients``, how many may be zeros where eager has none."""
    if section["raised"]:
        yield from unjudged(section)
        return
    yield from judge_leaves(section, "gradient")
    yield from judge_decided(section, limits)
    yield from judge_zero_gradients(section, limits)
    if section["compared"] and not section["nonzero"]:
        yield Problem("every gradient is zero, NaN or infinite in the eager run too: their equality proves nothing",
                      hint="give the model a loss that depends on its parameters (key `loss` of the model)")


CHECK = Check("gradients", measure, judge, remark)
