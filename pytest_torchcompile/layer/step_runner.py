"""Step runner: steps of one side of a benchmark, timed one after the other, and what one step does inside."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.gauges.coverage import measure_coverage
from pytest_torchcompile.gauges.kernels import Launches, count_launches, read_kernels
from pytest_torchcompile.gauges.replays import step_begins
from pytest_torchcompile.gauges.step_parts import StepParts, measure_parts
from pytest_torchcompile.gauges.step_profile import StepProfile, profile_step
from pytest_torchcompile.gauges.step_work import StepWork, measure_work
from pytest_torchcompile.gauges.user_python import measure_user_python
from pytest_torchcompile.ledger import observe
from pytest_torchcompile.ledger.records import Text

__all__ = ["SHORTEST_STEP", "StepInsides", "StepRunner", "device_of", "look_inside", "steady_coverage"]

SHORTEST_STEP: Final = 1e-6
"""Calling a module takes longer. A coarse clock may show no time at all, and nobody would wait for so many repeats."""


class StepRunner:
    """Runs steps of one side: ``loss(output, batch)`` with its backward pass, or, without a loss, a forward pass."""

    def __init__(self, call: Callable[..., Any], module: torch.nn.Module, loss: Callable[..., Any] | None) -> None:
        self.call, self.module, self.loss = call, module, loss
        self._parameters = list(module.parameters())

    def time_steps(self, batch: Batch, repeats: int, wall: bool = False) -> float:
        """Seconds of one step, as the mean of ``repeats`` in a row; at least :data:`SHORTEST_STEP`."""
        private, on_gpu = batch.clone(), device_of(batch) != "cpu"
        if on_gpu and not wall:
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(repeats):
                self.step(private)
            end.record()
            end.synchronize()
            return max(SHORTEST_STEP, float(begin.elapsed_time(end)) / 1e3 / repeats)
        start = time.perf_counter()
        for _ in range(repeats):
            self.step(private)
        if on_gpu:
            torch.cuda.synchronize()
        return max(SHORTEST_STEP, (time.perf_counter() - start) / repeats)

    def step(self, batch: Batch) -> None:
        """One step; gradients are dropped after it."""
        with torch.set_grad_enabled(self.loss is not None):
            output = self.forward(batch)
            if self.loss is not None:
                loss = self.loss(output, batch.for_loss)
                # A model without parameters, given numbers, has nothing to go back to.
                if loss.requires_grad:
                    loss.backward()
        for parameter in self._parameters:
            parameter.grad = None

    def forward(self, batch: Batch) -> Any:
        """The forward pass of a step; gradients are enabled where there is a loss."""
        step_begins()
        with torch.set_grad_enabled(self.loss is not None):
            return self.call(*batch.args, **batch.kwargs)

    def measure_parts(self, batch: Batch) -> StepParts:
        """What of some steps is the model, and what is not."""
        return measure_parts(self.call, batch, self.loss, self._parameters)


def device_of(batch: Batch) -> str:
    """The first GPU that a tensor of the batch lies on; ``cpu`` where none does."""
    for tensor in batch.tensors():
        if tensor.is_cuda:
            return str(tensor.device)
    return "cpu"


@dataclass
class StepInsides:
    """What one step of each side does inside; all that is measured beside the times."""

    kernels: list[int | None]
    """Eager and compiled."""
    profile: StepProfile
    launches: dict[str, Launches] = field(default_factory=dict)
    work: StepWork | None = None
    parts: StepParts | None = None
    eager_operators: tuple[str, ...] = ()
    """All that an eager step calls, by name."""


def look_inside(sides: Sequence[StepRunner], batch: Batch, texts: Iterable[Text]) -> StepInsides:
    """Kernels of one step of each by the profiler, where the time of a compiled step goes, and what eager computes."""
    on_gpu = device_of(batch) != "cpu"
    # Of eager only the kernels are asked, which one step shows as well as three.
    eager = profile_step(partial(sides[0].step, batch.clone()), times=1, seconds=0)
    compiled = profile_step(partial(sides[1].step, batch.clone()))
    compiled = replace(compiled, user_python=measure_user_python(partial(sides[1].step, batch.clone())))
    insides = StepInsides([eager.kernels + eager.kernels_in_graphs, None], compiled)
    insides.eager_operators = eager.operator_names
    if on_gpu:
        for name, side in zip(("eager", "compiled"), sides, strict=True):
            # The copy is made before: as a step's own it would keep the GPU busy for longer than the step.
            insides.launches[name] = count_launches(partial(side.step, batch.clone()))
        insides.kernels = [launched.kernels for launched in insides.launches.values()]
    else:
        insides.kernels[1] = compiled.kernels + _kernels_in_graphs(sides[1], batch, texts, compiled)
    # A model may be one that no dispatch mode can look into, and its times are worth telling all the same.
    with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
        insides.work = measure_work(partial(sides[0].step, batch.clone()))
        insides.parts = sides[0].measure_parts(batch.clone())
    return insides


def _kernels_in_graphs(side: StepRunner, batch: Batch, texts: Iterable[Text], profile: StepProfile) -> int:
    launched: Counter[str] = Counter()
    for kernel in read_kernels(texts):
        launched[kernel.compile_id] += kernel.launches
    with observe() as once:
        side.step(batch.clone())
    generated = [launched[graph.compile_id] * graph.runs for graph in once.graphs if graph.compile_id in launched]
    # Where there is no generated code, the graphs call eager's own operators.
    return sum(generated) if generated else profile.kernels_in_graphs


def steady_coverage(
    sides: tuple[StepRunner, StepRunner], maker: Callable[[int], Any], numbers: Iterable[int]
) -> float | None:
    """The share of operator calls that the forward passes of these batches run in graphs; None where there are none."""
    total = outside = 0
    for number in numbers:
        calls = [partial(side.forward, Batch.of(maker(number)).clone()) for side in sides]
        covered = measure_coverage(*calls)
        total, outside = total + covered.total, outside + covered.outside
    return 1 - outside / total if total else None
