"""Own decisions: what becomes of a program that decides otherwise than eager where only rounding decides.

Wide runs take over what eager has decided on counted numbers (:mod:`~pytest_torchcompile.oracle.counted_decisions`).
Compiled code may rightly decide otherwise. So what is wrong beside those runs is held beside others too, which decide
for themselves, with noise. Noise is wide there. It excuses no leaf that is less far off than a decision would move it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from pytest_torchcompile.oracle.counted_decisions import CountedDecisions, DecisionWatch
from pytest_torchcompile.oracle.estimate import Estimate, as_real, finite_values
from pytest_torchcompile.oracle.recording import Recording

__all__ = ["OwnDecisions", "watch_decisions"]

# Runs with noise that are watched. A decision that one in three takes otherwise is missed once in 25 times.
_RUNS: Final = 8
# Several decisions are other ones in most of these runs; compiled may have one that moves less.
_LEAST_SHARE: Final = 1 / 16


@dataclass(frozen=True)
class OwnDecisions:
    """Runs that decide for themselves."""

    expected: Mapping[str, Estimate]
    """With eager's decisions."""
    runs: Sequence[Mapping[str, Any]]
    """Of each run that has decided otherwise its values by name."""

    def may_explain(self, name: str, value: Any) -> bool:
        """Whether a value of compiled code is as far off as another decision may move it."""
        estimate = self.expected.get(name)
        if estimate is None or not estimate.continuous:
            return True
        distance = _distance(value, estimate)
        steps = [_distance(run.get(name), estimate) for run in self.runs]
        return distance >= _LEAST_SHARE * statistics.median(steps)


def watch_decisions(taken: CountedDecisions, wide: torch.dtype,
                    run: Callable[[int, DecisionWatch], Recording]) -> list[dict[str, Any]]:
    """The values of runs with noise that have decided otherwise than eager.

    ``run``: makes one with the noise of this number, and has it watched.
    """
    found = []
    for number in range(_RUNS):
        watch = DecisionWatch(taken, wide)
        recording = run(number, watch)
        if watch.is_other and recording.error is None:
            found.append(recording.values_by_name())
    return found


def _distance(value: Any, estimate: Estimate) -> float:
    """Root mean square of what a value is off by; endless where it is of another shape."""
    if isinstance(value, float):
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor):
        return float("inf")
    value, expected = as_real(value.detach()).double(), estimate.value.double()
    if value.shape != expected.shape:
        return float("inf")
    apart = finite_values(value.to(expected.device)) - finite_values(expected)
    return float(apart.square().mean().sqrt()) if apart.numel() else 0.0
