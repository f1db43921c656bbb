"""pp: pipeline parallel, by ``torch.distributed.pipelining``. Each rank runs one stage of the model, and passes what it
has made of a microbatch on to the next.

A model says how it is cut by a method ``stage(index, count)``, which returns a module for that part of it: made of the
model's own submodules, called with what the stage before it returned. A schedule runs forward and backward in one
go, with a loss of its own; here the loss is the cell's, of the whole output. So the output is computed by a forward of
the pipeline, and its backward is a step of the schedule with the loss ``sum(output * gradient)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import Unavailable, UsageError
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.oracle.spread import Spread
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper, shipped_wrapper
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["PP"]


def _wrap_in_pipeline(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    cut = getattr(model, "stage", None)
    if not callable(cut):
        raise UsageError(f"wrapper {cell.wrapper!r} cuts a model by its method stage(index, count), and model "
                         f"{cell.model!r} has none; see pytest_torchcompile.zoo.MiniGPT for one")
    stage = cut(mesh.get_local_rank(), mesh.size())
    if settings is not None and Wrapping.read(cell.wrapper).order == "inner_blocks":
        # Not compile_blocks(): a stage may have no block at all, where the model has some.
        for part in stage.modules():
            if isinstance(part, nn.ModuleList):
                for block in part:
                    block.compile(**settings)
    elif settings is not None:
        stage.compile(**settings)
    return _Pipeline(stage, mesh)


class _Pipeline:
    """The model's forward over all stages: every rank is given the output, and gets the gradients of its stage."""

    def __init__(self, stage: nn.Module, mesh: Any) -> None:
        self.stage, self.mesh = stage, mesh
        self.rank = mesh.get_local_rank()
        self.last = mesh.size() - 1
        self._schedules: dict[Any, tuple[Any, Any]] = {}
        """Two for each shape of the inputs: one for forwards, and one for steps."""

    def __call__(self, *args: Any) -> Any:
        forward, step = self.schedules_for(args)
        output = self.run_forward(forward, args)
        if not torch.is_grad_enabled():
            return output
        # Without an input that wants a gradient autograd would not call backward() of the step.
        anchor = torch.zeros((), requires_grad=True, device=output.device)
        return _Step.apply(self, step, output, anchor, *args)  # type: ignore[no-untyped-call]

    def schedules_for(self, args: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
        """Schedules that know the shapes, for forwards and for steps. Each learns the shapes in its first forward."""
        from torch.distributed.pipelining import ScheduleGPipe

        key = tuple((a.shape, a.dtype) for a in args)
        if key not in self._schedules:
            stages = [self._make_stage(args[0].device) for _ in range(2)]
            count = _microbatch_count(args[0].shape[0])
            forward = ScheduleGPipe(stages[0], count)
            step = ScheduleGPipe(stages[1], count, loss_fn=_weighted_sum, scale_grads=False)
            # The first forward is on tensors without values, of which nothing should be compiled.
            with eager_on_purpose(), torch.compiler.set_stance("force_eager"):
                output = self.run_forward(forward, args)
                self.run_forward(step, args, target=torch.zeros_like(output))
            self._schedules[key] = forward, step
        return self._schedules[key]

    def _make_stage(self, device: torch.device) -> Any:
        from torch.distributed.pipelining import PipelineStage

        entered = _Entered(self.stage, received=self.rank > 0)
        return PipelineStage(entered, self.rank, self.mesh.size(), device, group=self.mesh.get_group())

    def run_forward(self, schedule: Any, args: tuple[torch.Tensor, ...],
                    target: torch.Tensor | None = None) -> torch.Tensor:
        """The output of the last stage, on every rank."""
        output: torch.Tensor = schedule.eval(*self.given_to_first(args), target=self.given_to_last(target))
        is_last = self.rank == self.last
        shape: list[Any] = [(output.shape, output.dtype)] if is_last else [None]
        group = self.mesh.get_group()
        source = dist.get_global_rank(group, self.last)
        # The other stages know neither shape nor dtype of an output that they never see.
        dist.broadcast_object_list(shape, source, group)
        if not is_last:
            size, dtype = shape[0]
            output = torch.empty(size, dtype=dtype, device=args[0].device)
        # NCCL and gloo send memory as it lies.
        output = output.detach().contiguous()
        dist.broadcast(output, source, group)
        return output

    def given_to_first(self, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The inputs on the first stage, and nothing on those after it, which receive theirs."""
        return args if self.rank == 0 else ()

    def given_to_last(self, target: torch.Tensor | None) -> torch.Tensor | None:
        """The target on the last stage, which alone has an output to hold it against."""
        return None if target is None or self.rank != self.last else target.contiguous()


class _Entered(nn.Module):
    """A stage that is always given an input with a gradient: a forward of the pipeline hands on some without, a step
    some with, and the stage would be compiled for each.

    What was ``received`` is a buffer of torch's own, off which it reads the gradient for the stage before, so it is
    this tensor that wants one: a buffer that was made for a forward does not (torch 2.11). Other inputs are the user's.
    """

    def __init__(self, stage: nn.Module, *, received: bool) -> None:
        super().__init__()
        self.stage, self.received = stage, received

    def forward(self, x: torch.Tensor) -> Any:
        if x.is_floating_point() and torch.is_grad_enabled() and not x.requires_grad:
            if not self.received:
                x = x.detach()
            x.requires_grad_()
        return self.stage(x)


class _Step(torch.autograd.Function):
    """The output of a forward of the pipeline; its backward is a step of the schedule."""

    @staticmethod
    def forward(context: Any, pipeline: _Pipeline, step: Any, output: torch.Tensor, anchor: torch.Tensor,
                *args: Any) -> torch.Tensor:
        context.pipeline, context.step, context.args = pipeline, step, args
        return output.view_as(output)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        pipeline = context.pipeline
        with torch.enable_grad():
            context.step.step(*pipeline.given_to_first(context.args),
                              target=pipeline.given_to_last(gradient))
        # Nobody reads it: the gradients that count are already in the stage's parameters.
        anchor = torch.zeros((), device=gradient.device)
        return None, None, None, anchor, *(None for _ in context.args)


def _weighted_sum(output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return (output * gradient).sum()


def _microbatch_count(rows: int) -> int:
    """The least number above 1 that divides the rows."""
    for count in range(2, rows + 1):
        if rows % count == 0:
            return count
    return 1


def _check_numpy() -> None:
    # Stages tell each other their shapes as objects, which torch turns into arrays.
    if find_spec("numpy") is None:
        raise Unavailable("wrapper pp needs NumPy, with which torch.distributed sends objects; pip install numpy")


class _Stages(Spread):
    """A rank has the parameters of its stage alone, and no two ranks run the same program."""

    alike = False
    call: _Pipeline

    def own_parameters(self) -> Iterable[nn.Parameter]:
        """Those of this rank's stage."""
        return self.call.stage.parameters()


PP: Wrapper = shipped_wrapper("pp", _wrap_in_pipeline, spread=_Stages, check=_check_numpy)
