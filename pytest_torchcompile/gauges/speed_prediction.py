"""Speed prediction: how much faster a compiled step will be, from eager steps alone.

An eager step of N operators takes N calls and the work of each. Compiled, each run of fusible operators is one call
that moves only what it takes and returns, and library calls stay what they are. The loss, and what graph breaks leave
to eager, take what they took::

    predicted = eager / (rest + fixed + calls after fusion * call + work after fusion)

On a CPU calls and work follow one another. On a GPU the host calls while the GPU works, so that the longer of both
counts, and part of the shorter. Replayed graphs need no calls, but the host fills and reads them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from pytest_torchcompile.gauges.machine_peaks import MachinePeaks
from pytest_torchcompile.gauges.step_parts import StepParts
from pytest_torchcompile.gauges.step_work import OperatorWork, StepWork, function_seconds

__all__ = ["PredictedSpeed", "predict_speed"]

FIXED_CALLS: Final = {False: 20.0, True: 60.0}
"""What guards and the wrappers around a graph take, in calls of a small operator: without and with a backward pass.
Fitted to the zoo on a CPU; a prediction's error is told beside it. So is what follows, on an H100."""
FIXED_CALLS_ON_GPU: Final = {False: 10.0, True: 70.0}
FIXED_CALLS_REPLAYED: Final = {False: 16.0, True: 80.0}
"""Where CUDA graphs are replayed: inputs are copied, outputs looked after."""
CALLS_OF_GRADIENT: Final = 2.5
"""What each gradient that a replayed graph returns costs the host."""
SHORT_KERNEL: Final = 2e-6
"""Seconds that the shortest kernel keeps a GPU."""
_CONVOLUTIONS: Final = ("convolution", "convolution_backward")
APART: Final = 0.25
"""The share of the shorter of both, host and GPU, that is not hidden behind the longer: a GPU has nothing to do until
the first kernel of a step is launched."""


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
    coverage: float = 1.0, busy_seconds: float | None = None, product_seconds: float = 0.0, replayed: bool = False,
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
        product_seconds: Of that what products, convolutions and attention take: a library's work on both sides.
        replayed: CUDA graphs are promised: the host launches one graph in place of each kernel.
    """
    parts = _no_longer_than(eager_seconds, parts)
    fusion = _fusion_of(parts.work, peaks)
    if busy_seconds is None:
        compiled = _seconds_on_cpu(parts, fusion, peaks, eager_seconds, trains)
    else:
        # One step was profiled, and others were timed. The GPU works no longer than a step takes.
        scale = min(1.0, eager_seconds / busy_seconds) if busy_seconds else 1.0
        busy_seconds, product_seconds = scale * busy_seconds, scale * product_seconds
        fusible = (busy_seconds - product_seconds) * _share_of_model(step, parts.work)
        # Eager's own kernels may be far from the memory's speed, as those of a layer norm are. Generated ones are near.
        busy = busy_seconds - fusible + min(fusible, fusion.fused_seconds)
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


def _no_longer_than(eager_seconds: float, parts: StepParts) -> StepParts:
    """The parts of a step, which together take the host no longer than the step does: what is longer is noise."""
    seconds = parts.model_seconds + parts.rest_seconds
    if seconds <= eager_seconds:
        return parts
    scale = eager_seconds / seconds
    return replace(parts, model_seconds=parts.model_seconds * scale, rest_seconds=parts.rest_seconds * scale)


@dataclass(frozen=True)
class _Fusion:
    """What fusion leaves of the model's work."""

    at_peak: float
    """Of the time that the work takes at the machine's peaks."""
    fused_seconds: float
    """What the bytes that fused kernels move take at the memory's peak."""
    calls_after: int
    bytes_saved: float


def _fusion_of(work: StepWork, peaks: MachinePeaks) -> _Fusion:
    library = [operator for operator in work.operators if operator.library]
    # Fusion makes nothing shorter of either.
    products = sum(_roof_seconds(operator, peaks) for operator in library) + function_seconds(work, peaks)
    moved = _fusible_bytes(work)
    in_library = sum(operator.bytes for operator in library)
    kept = max(0, work.fused_bytes - in_library)
    fusible, fused = moved / peaks.bandwidth, min(moved, kept) / peaks.bandwidth
    return _Fusion(
        at_peak=(products + fused) / (products + fusible) if products + fusible else 1.0,
        fused_seconds=fused,
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
    """Of the compiled step, whose kernels take ``busy`` seconds: those of the host and of the GPU, as they overlap."""
    if replayed:
        calls = FIXED_CALLS_REPLAYED[trains] + CALLS_OF_GRADIENT * parts.gradients
        launching = calls * peaks.call_seconds
    else:
        # A call from generated code, with the memory that it needs, costs the host what one from the model does.
        each = parts.model_seconds / parts.work.calls if parts.work.calls else 0.0
        # Inductor gives convolutions on a GPU their channels last, and copies each weight into that layout each time.
        convolutions = sum(operator.calls for operator in parts.work.operators if operator.name in _CONVOLUTIONS)
        launching = FIXED_CALLS_ON_GPU[trains] * peaks.call_seconds + (fusion.calls_after + convolutions) * each
    host = parts.rest_seconds + launching
    return max(host, busy) + APART * min(host, busy)


def _share_of_model(step: StepWork, model: StepWork) -> float:
    """The share of the model in the bytes that the fusible operators of a step move."""
    whole, own = _fusible_bytes(step), _fusible_bytes(model)
    return min(1.0, own / whole) if whole else 0.0


def _fusible_bytes(work: StepWork) -> int:
    return sum(operator.bytes for operator in work.operators if not operator.library)


def _roof_seconds(operator: OperatorWork, peaks: MachinePeaks) -> float:
    # The rule was fitted with this peak, convolutions of float32 among the rest.
    computing = operator.flops / peaks.products_per_second(operator.dtype) if operator.library else 0.0
    return max(computing, operator.bytes / peaks.bandwidth)
