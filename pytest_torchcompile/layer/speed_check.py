"""Speed check: is a model that maybe_compile has compiled as much faster as ``CompileConfig.min_speedup`` wants?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pytest_torchcompile.layer.benchmark import steady_ratio
from pytest_torchcompile.layer.benchmark_result import NOT_TOLD, speed_text
from pytest_torchcompile.layer.compiled_modules import join_modules
from pytest_torchcompile.layer.guarded_model import Guard
from pytest_torchcompile.layer.sample_batch import batch_for
from pytest_torchcompile.layer.step_runner import StepRunner
from pytest_torchcompile.layer.training_step import loss_of_step

__all__ = ["SpeedAnswer", "measure_speed"]

SECONDS: Final = 2.0
"""About how long the timed steps may take, where eight rounds take no longer."""


@dataclass(frozen=True)
class SpeedAnswer:
    """What the timing says."""

    enough: bool
    """False only where all of the 99 % interval lies below what is wanted."""
    text: str


def measure_speed(
    model: Callable[..., Any], compiled: Callable[..., Any], guard: Guard, sample_batch: Any, wanted: float
) -> SpeedAnswer:
    """Time steps on the sample batch, eager and compiled turn by turn; the model's state is put back.

    A step is a forward pass, and with a model that is being trained a backward pass too, of a loss of our own. What is
    raised in it is raised as it is.
    """
    module = join_modules(model, None)
    loss = loss_of_step(module, None, None)

    def run_eagerly(*args: Any, **kwargs: Any) -> Any:
        # Parts of the original may be guarded and compiled in place; so they run as they were.
        guard.runs_eagerly = True
        try:
            return model(*args, **kwargs)
        finally:
            guard.runs_eagerly = False

    batch = batch_for(model, sample_batch)
    eager_side, compiled_side = StepRunner(run_eagerly, module, loss), StepRunner(compiled, module, loss)
    ratio, verdict = steady_ratio(eager_side, compiled_side, batch, seconds=SECONDS)
    found = speed_text(ratio.speedup, ratio.speedup_interval)
    _, high = ratio.speedup_interval
    if high < wanted:
        return SpeedAnswer(False, f"{found}, at least {wanted:g} wanted (min_speedup)")
    if verdict == NOT_TOLD:
        return SpeedAnswer(True, f"whether it is {wanted:g} times as fast {NOT_TOLD}, for the machine is busy: {found}")
    return SpeedAnswer(True, found)
