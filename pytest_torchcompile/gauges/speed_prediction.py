"""Speed prediction: how much faster a compiled step will be, from eager steps alone.

An eager step of N operators takes N calls and the work of each. Compiled, each run of fusible operators is one call
that moves only what it takes and returns, and library calls stay what they are. The loss, and what graph breaks leave
to eager, take what they took::

    predicted = eager / (rest + fixed + calls after fusion * call + work after fusion)

On a CPU calls and work follow one another. On a GPU the host calls while the GPU works, so that the longer of both
counts. Replayed graphs need no calls, but each waits for the host that fills it and reads it, so that part of the
shorter counts too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from pytest_torchcompile.gauges.machine_peaks import MachinePeaks
from pytest_torchcompile.gauges.step_parts import StepParts
from pytest_torchcompile.gauges.step_work import OperatorWork, StepWork

__all__ = ["PredictedSpeed", "predict_speed"]

FIXED_CALLS: Final = {False: 20.0, True: 60.0}
"""What guards and the wrappers around a graph take, in calls of a small operator: without and with a backward pass.
Fitted to the zoo on a CPU; a prediction's error is told beside it. So is what follows, on an H100."""
FIXED_CALLS_ON_GPU: Final = {False: 15.0, True: 62.0}
FIXED_CALLS_REPLAYED: Final = {False: 22.0, True: 65.0}
"""Where CUDA graphs are replayed: inputs are copied, outputs looked after."""
CALLS_OF_GRADIENT: Final = 4.5
"""What each gradient that a replayed graph returns costs the host."""
SHORT_KERNEL: Final = 2e-6
"""Seconds that the shortest kernel keeps a GPU."""
_CONVOLUTIONS: Final = ("convolution", "convolution_backward")
APART: Final = 0.5
"""The share of the shorter of both, host and GPU, that replayed graphs do not hide behind the longer."""


@dataclass(frozen=True)
class PredictedSpeed:
    """What is expected of compiling, and what it rests on."""

    speedup: float
    launch_share: float
    """The share of the eager step that is calling operators."""
    bytes_saved: float
    """The share of the model's bytes in an eager step that fusion need not move."""
    calls_before: int
    """Of the model: operators that compute something."""
    calls_after: int
    rest_share: float
    """The share of the eager step that is not the model's: the loss and its backward pass."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def predict_speed(
    step: StepWork, parts: StepParts, peaks: MachinePeaks, eager_seconds: float, *, trains: bool = False,
    coverage: float = 1.0, busy_seconds: float | None = None, replayed: bool = False,
) -> PredictedSpeed:
    """Predict from eager steps.

    Args:
        step: The work of a whole step.
        parts: Its parts.
        peaks: Of the machine.
        eager_seconds: What the step takes.
        trains: There is a backward pass.
        coverage: The share of the model's operator calls in graphs, as graph breaks leave it.
        busy_seconds: How long a GPU works in the step; None on a CPU.
        replayed: CUDA graphs are promised: the host launches one graph in place of each kernel.
    """
    fusion = _fusion_of(parts.work, peaks)
    if busy_seconds is None:
        compiled = _seconds_on_cpu(parts, fusion, peaks, eager_seconds, trains)
    else:
        model_busy = busy_seconds * _share_of_model(step, parts.work, peaks)
        busy = busy_seconds - model_busy + model_busy * fusion.at_peak
        busy = max(busy, fusion.calls_after * SHORT_KERNEL)
        compiled = _seconds_on_gpu(parts, fusion, peaks, busy, trains, replayed)
    expected = coverage * compiled + (1 - coverage) * eager_seconds
    return PredictedSpeed(
        speedup=eager_seconds / expected if expected else 1.0,
        launch_share=min(1.0, step.calls * peaks.call_seconds / eager_seconds) if eager_seconds else 0.0,
        bytes_saved=fusion.bytes_saved,
        calls_before=parts.work.calls,
        calls_after=fusion.calls_after,
        rest_share=1 - parts.model_share,
    )


@dataclass(frozen=True)
class _Fusion:
    """What fusion leaves of the model's work."""

    at_peak: float
    """Of the time that the work takes at the machine's peaks."""
    calls_after: int
    bytes_saved: float


def _fusion_of(work: StepWork, peaks: MachinePeaks) -> _Fusion:
    library = [operator for operator in work.operators if operator.library]
    products = sum(_roof_seconds(operator, peaks) for operator in library)
    moved = sum(operator.bytes for operator in work.operators if not operator.library)
    in_library = sum(operator.bytes for operator in library)
    kept = max(0, work.fused_bytes - in_library)
    fusible, fused = moved / peaks.bandwidth, min(moved, kept) / peaks.bandwidth
    return _Fusion(
        at_peak=(products + fused) / (products + fusible) if products + fusible else 1.0,
        calls_after=sum(operator.calls for operator in library) + work.groups,
        bytes_saved=1 - min(1.0, (in_library + kept) / work.bytes) if work.bytes else 0.0,
    )


def _seconds_on_cpu(
    parts: StepParts, fusion: _Fusion, peaks: MachinePeaks, eager_seconds: float, trains: bool
) -> float:
    """Of the compiled step: the rest, what is fixed, calls, and the work that they call."""
    model = eager_seconds * parts.model_share
    working = max(0.0, model - parts.work.calls * peaks.call_seconds)
    calls = FIXED_CALLS[trains] + fusion.calls_after
    return eager_seconds - model + calls * peaks.call_seconds + working * fusion.at_peak


def _seconds_on_gpu(
    parts: StepParts, fusion: _Fusion, peaks: MachinePeaks, busy: float, trains: bool, replayed: bool
) -> float:
    """Of the compiled step, whose kernels take ``busy`` seconds: those of the host, or those of the GPU."""
    if replayed:
        calls = FIXED_CALLS_REPLAYED[trains] + CALLS_OF_GRADIENT * parts.gradients
        host = parts.rest_seconds + calls * peaks.call_seconds
        return max(host, busy) + APART * min(host, busy)
    # A call from generated code, with the memory that it needs, costs the host what one from the model does.
    each = parts.model_seconds / parts.work.calls if parts.work.calls else 0.0
    # Inductor gives convolutions on a GPU their channels last, and copies each weight into that layout in each step.
    convolutions = sum(operator.calls for operator in parts.work.operators if operator.name in _CONVOLUTIONS)
    host = parts.rest_seconds + FIXED_CALLS_ON_GPU[trains] * peaks.call_seconds
    host += (fusion.calls_after + convolutions) * each
    return max(host, busy)


def _share_of_model(step: StepWork, model: StepWork, peaks: MachinePeaks) -> float:
    """The share of the model in what the step takes at the machine's peaks."""
    whole = sum(_roof_seconds(operator, peaks) for operator in step.operators)
    own = sum(_roof_seconds(operator, peaks) for operator in model.operators)
    return min(1.0, own / whole) if whole else 1.0


def _roof_seconds(operator: OperatorWork, peaks: MachinePeaks) -> float:
    computing = operator.flops / peaks.products_per_second(operator.dtype) if operator.library else 0.0
    return max(computing, operator.bytes / peaks.bandwidth)
