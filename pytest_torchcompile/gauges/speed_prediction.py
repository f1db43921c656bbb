"""Speed prediction: how much faster a compiled step will be, from an eager step alone.

An eager step of N operators takes N calls and the work of each. Compiled, each run of fusible operators is one call
that moves only what it takes and returns, and library calls stay what they are::

    predicted = eager / (fixed + calls after fusion * call + work after fusion)

``work`` is what eager takes beyond its calls, shared out by each operator's time at the machine's peaks. On a GPU calls
and work overlap, so that the longer of both counts. What graph breaks leave to eager stays as it is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from pytest_torchcompile.gauges.machine_peaks import MachinePeaks
from pytest_torchcompile.gauges.step_work import StepWork

__all__ = ["PredictedSpeed", "predict_speed"]

FIXED_CALLS: Final = {False: 20.0, True: 60.0}
"""What guards and the wrappers around a graph take, in eager calls: without and with a backward pass. Fitted to the
zoo on a CPU; a prediction's error is told beside it."""
SHORT_KERNEL: Final = 2e-6
"""Seconds that the shortest kernel keeps a GPU."""


@dataclass(frozen=True)
class PredictedSpeed:
    """What is expected of compiling, and what it rests on."""

    speedup: float
    launch_share: float
    """The share of the eager step that is calling operators."""
    bytes_saved: float
    """The share of the eager step's bytes that fusion need not move."""
    calls_before: int
    calls_after: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def predict_speed(
    work: StepWork, peaks: MachinePeaks, eager_seconds: float, *, trains: bool = False, coverage: float = 1.0,
    busy_seconds: float | None = None, replayed: bool = False,
) -> PredictedSpeed:
    """Predict from an eager step.

    Args:
        work: Of the step.
        peaks: Of the machine.
        eager_seconds: What the step takes.
        trains: There is a backward pass.
        coverage: The share of operator calls in graphs, as graph breaks leave it.
        busy_seconds: How long a GPU works in the step; None on a CPU.
        replayed: CUDA graphs are promised: the host launches one graph in place of each kernel.
    """
    library = [operator for operator in work.operators if operator.library]
    products = sum(_roof_seconds(operator.flops, operator.bytes, operator.dtype, peaks) for operator in library)
    moved = sum(operator.bytes for operator in work.operators if not operator.library)
    in_library = sum(operator.bytes for operator in library)
    kept = max(0, work.fused_bytes - in_library)
    fusible, fused = moved / peaks.bandwidth, min(moved, kept) / peaks.bandwidth
    at_peak = (products + fused) / (products + fusible) if products + fusible else 1.0
    before, after = work.calls, sum(operator.calls for operator in library) + work.groups
    fixed = FIXED_CALLS[trains] * peaks.call_seconds
    if busy_seconds is None:
        working = max(0.0, eager_seconds - before * peaks.call_seconds)
        compiled = fixed + after * peaks.call_seconds + working * at_peak
    else:
        host = fixed + (0.0 if replayed else after * peaks.call_seconds)
        compiled = max(host, busy_seconds * at_peak, after * SHORT_KERNEL)
    expected = coverage * compiled + (1 - coverage) * eager_seconds
    return PredictedSpeed(
        eager_seconds / expected if expected else 1.0,
        min(1.0, before * peaks.call_seconds / eager_seconds) if eager_seconds else 0.0,
        1 - min(1.0, (in_library + kept) / work.bytes) if work.bytes else 0.0, before, after,
    )  # fmt: skip


def _roof_seconds(flops: int, size: int, dtype: str, peaks: MachinePeaks) -> float:
    return max(flops / peaks.products_per_second(dtype), size / peaks.bandwidth)
