"""training_steps: a few steps of SGD through the compiled model leave what they leave eagerly. Training cells only.

Outputs, loss and gradients of each step, parameters and buffers after the last. What a single backward pass can't
show: compiled code that keeps parameters as they were when it was compiled, or gradients from the step before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.layout import is_stride
from pytest_torchcompile.checks.numerics import judge_decided, judge_leaves, numerics, remark
from pytest_torchcompile.checks.protocol import Check, unjudged
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["CHECK", "STEPS"]

STEPS = 3
"""Steps where the matrix gives no limit ``steps``."""


def measure(run: Trial) -> dict[str, Any]:
    """What was compared in the steps, and how many there were."""
    section = numerics(run, [(label, leaf) for label, leaf in run.trained if not is_stride(leaf)])
    return section | {"steps": run.steps if run.trained else 0, "rate": run.rate}


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``steps``, how many must have been compared."""
    if section["raised"]:
        yield from unjudged(section)
        return
    if not section["steps"]:
        yield Problem("no step was made: no parameter of the model has a gradient, or eager does not train",
                      hint="give the model a loss that depends on its parameters (key `loss` of the model)")
        return
    if section["steps"] < (least := limits.get("steps", STEPS)):
        yield Problem(f"{section['steps']} training steps were compared, {least:g} wanted",
                      hint="the observation was made under a lower limit `steps`: run the cell again")
    yield from judge_leaves(section, "step")
    yield from judge_decided(section, limits)


CHECK = Check("training_steps", measure, judge, remark)
