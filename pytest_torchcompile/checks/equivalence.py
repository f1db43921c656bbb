"""equivalence: the compiled model computes what the eager one computes, within the rounding noise of both.

Outputs, loss, buffers, mutated inputs, dtypes, shapes, random generators, torch's settings; in the calls that compile,
in the same calls with other values, and again. Gradients are the check `gradients`, memory is `aliasing`, strides are
`layout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.layout import is_stride
from pytest_torchcompile.checks.numerics import GRADIENT, judge_decided, judge_leaves, numerics, remark
from pytest_torchcompile.checks.protocol import Check, unjudged
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["CHECK"]


def measure(run: Trial) -> dict[str, Any]:
    """Everything that was compared in the calls, but gradients and the sharing of memory."""
    return numerics(run, [(label, leaf) for label, leaf in run.leaves
                          if not leaf.name.startswith(GRADIENT) and leaf.kind != "alias" and not is_stride(leaf)])


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``rms``, ``bias`` and ``peak``, in units of the program's noise."""
    if section["raised"]:
        yield from unjudged(section)
    else:
        yield from judge_leaves(section, "output", limits)
        yield from judge_decided(section, limits)


CHECK = Check("equivalence", measure, judge, remark)
