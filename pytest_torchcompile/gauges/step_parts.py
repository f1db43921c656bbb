"""Step parts: what of an eager step is the model, which ``torch.compile`` is given, and what stays eager on both sides.

A loss, and its backward pass, are the training loop's own. They run outside of the compiled model, so compiling makes
no second of them shorter. Parts are told apart by running the backward pass in two: from the loss to the outputs, and
from the outputs on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.gauges.step_work import StepWork, WorkCounter

__all__ = ["StepParts", "measure_parts"]

_TIMES: Final = 5


@dataclass(frozen=True)
class StepParts:
    """One eager step. Seconds are those of the host: a GPU is not waited for."""

    model_seconds: float
    """In the forward and backward pass of the model."""
    rest_seconds: float
    """In the loss and its backward pass."""
    gradients: int
    """Tensors that the model's backward pass gives a gradient: parameters, and inputs that want one."""
    work: StepWork
    """Of the model alone."""

    @property
    def model_share(self) -> float:
        """The share of the model in the host's seconds."""
        seconds = self.model_seconds + self.rest_seconds
        return self.model_seconds / seconds if seconds else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "work": self.work.to_dict()}


def measure_parts(
    call: Callable[..., Any], batch: Batch, loss: Callable[..., Any] | None, parameters: Sequence[torch.Tensor] = ()
) -> StepParts:
    """Run some eager steps, and time and count their parts.

    Args:
        call: The eager model.
        batch: What it is called with.
        loss: ``loss(output, batch)``; None: a forward pass without gradients, which has no rest.
        parameters: Of the model. Their gradients are dropped after each step, as the steps that are timed do.
    """
    on_gpu = any(tensor.is_cuda for tensor in batch.tensors())
    timed = []
    for _ in range(_TIMES):
        if on_gpu:
            # What a full queue waits for is no time of the host's.
            torch.cuda.synchronize()
        timed.append(_run_timed(call, batch, loss))
        _drop_gradients(parameters)
    counter = WorkCounter()
    _run_in_parts(call, batch, loss, lambda: counter)
    _drop_gradients(parameters)
    wanted = sum(tensor.requires_grad for tensor in [*parameters, *batch.tensors()])
    # What interrupts a step only makes it longer.
    model_seconds = min(model for model, _ in timed)
    rest_seconds = min(rest for _, rest in timed)
    return StepParts(model_seconds, rest_seconds, 0 if loss is None else wanted, counter.work())


def _drop_gradients(parameters: Sequence[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


class _Stopwatch:
    """Seconds that pass while it is entered, all together."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._begun


def _run_timed(call: Callable[..., Any], batch: Batch, loss: Callable[..., Any] | None) -> tuple[float, float]:
    """Seconds of the model and of the rest."""
    watch = _Stopwatch()
    begun = time.perf_counter()
    _run_in_parts(call, batch, loss, lambda: watch)
    return watch.seconds, max(0.0, time.perf_counter() - begun - watch.seconds)


def _run_in_parts(
    call: Callable[..., Any], batch: Batch, loss: Callable[..., Any] | None,
    around_model: Callable[[], AbstractContextManager[object]],
) -> None:
    """One step, with ``around_model()`` entered while the model works: for the forward pass, and for the backward."""
    with torch.set_grad_enabled(loss is not None):
        with around_model():
            output = call(*batch.args, **batch.kwargs)
        if loss is None:
            return
        value = loss(output, batch.for_loss)
        outputs = _differentiable(output)
        if any(leaf is value for leaf in outputs):
            # The model computes its loss itself: all of the backward pass is its own.
            outputs, gradients = [value], [torch.ones_like(value)]
        else:
            outputs, gradients = _gradients_of_outputs(value, outputs)
        if outputs:
            with around_model():
                torch.autograd.backward(outputs, gradients)


def _gradients_of_outputs(
    value: torch.Tensor, outputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs that the loss rests on, and its gradient by each."""
    if not outputs:
        return [], []
    # Outputs may be made of one another, so that the same part of the graph is needed once more. None for one unused.
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(value, outputs, retain_graph=True, allow_unused=True)
    used, gradients = [], []
    for leaf, gradient in zip(outputs, found, strict=True):
        if gradient is not None:
            used.append(leaf)
            gradients.append(gradient)
    return used, gradients


def _differentiable(output: Any) -> list[torch.Tensor]:
    """Each tensor of an output that has a gradient, once."""
    tensors: dict[int, torch.Tensor] = {}
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            tensors[id(leaf)] = leaf
    return list(tensors.values())
