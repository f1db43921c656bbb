"""pp: pipeline parallel, by ``torch.distributed.pipelining``. Each rank runs one stage of the model, and passes what it
has made of a microbatch on to the next.

A model says how it is cut by a method ``stage(index, count)``, which returns a module for that part of it: made of the
model's own submodules, called with what the stage before it returned. A schedule runs forward and backward in one
go, with a loss of its own; here the loss is the cell's, of the whole output. So the output is computed by a forward of
the pipeline, and its backward is a step of the schedule with the loss ``sum(output * gradient)``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import Unavailable, UsageError
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["PP"]


def _wrap(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    cut = getattr(model, "stage", None)
    if not callable(cut):
        raise UsageError(f"wrapper {cell.wrapper!r} cuts a model by its method stage(index, count), and model "
                         f"{cell.model!r} has none; see pytest_torchcompile.zoo.MiniGPT for one")
    stage = cut(mesh.get_local_rank(), mesh.size())
    if settings is not None and Wrapping.read(cell.wrapper).order == "inner_blocks":
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
        self.last = mesh.size() - 1
        self.ready: dict[Any, tuple[Any, Any]] = {}
        """Two schedules for each shape of the inputs: one for forwards, and one for steps."""

    @property
    def owned(self) -> list[nn.Parameter]:
        """The parameters of this rank's stage."""
        return list(self.stage.parameters())

    def __call__(self, *args: Any) -> Any:
        through, step = self.schedules(args)
        output = self.forward(through, args)
        if not torch.is_grad_enabled():
            return output
        anchor = torch.zeros((), requires_grad=True, device=output.device)
        return _Step.apply(self, step, output, anchor, *args)  # type: ignore[no-untyped-call]

    def schedules(self, args: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
        """Schedules that know the shapes. Each learns them in its first forward, which runs eagerly: on tensors without
        values nothing should be compiled."""
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        key = tuple((a.shape, a.dtype) for a in args)
        if key not in self.ready:
            first, second = (
                PipelineStage(_Entered(self.stage, received=self.mesh.get_local_rank() > 0), self.mesh.get_local_rank(),
                              self.mesh.size(), args[0].device, group=self.mesh.get_group()) for _ in range(2))
            count = _microbatches(args[0].shape[0])
            through = ScheduleGPipe(first, count)
            step = ScheduleGPipe(second, count, loss_fn=_weighted, scale_grads=False)
            with eager_on_purpose(), torch.compiler.set_stance("force_eager"):
                output = self.forward(through, args)
                self.forward(step, args, target=torch.zeros_like(output))
            self.ready[key] = through, step
        return self.ready[key]

    def forward(self, schedule: Any, args: tuple[torch.Tensor, ...],
                target: torch.Tensor | None = None) -> torch.Tensor:
        """The output of the last stage, on every rank."""
        rank = self.mesh.get_local_rank()
        output = schedule.eval(*(args if rank == 0 else ()), target=target if rank == self.last else None)
        shape: list[Any] = [(output.shape, output.dtype) if rank == self.last else None]
        source = dist.get_global_rank(self.mesh.get_group(), self.last)
        dist.broadcast_object_list(shape, source, self.mesh.get_group())
        output = output if rank == self.last else torch.empty(shape[0][0], dtype=shape[0][1], device=args[0].device)
        output = output.detach().contiguous()
        dist.broadcast(output, source, self.mesh.get_group())
        return output


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
            x = (x if self.received else x.detach()).requires_grad_()
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
        pipeline, rank = context.pipeline, context.pipeline.mesh.get_local_rank()
        with torch.enable_grad():
            context.step.step(*(context.args if rank == 0 else ()),
                              target=gradient.contiguous() if rank == pipeline.last else None)
        return None, None, None, torch.zeros((), device=gradient.device), *(None for _ in context.args)


def _weighted(output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return (output * gradient).sum()


def _microbatches(rows: int) -> int:
    """The least number above 1 that divides the rows."""
    return next((count for count in range(2, rows + 1) if rows % count == 0), 1)


def _check() -> None:
    if find_spec("numpy") is None:  # stages tell each other their shapes as objects, which torch turns into arrays
        raise Unavailable("wrapper pp needs NumPy, with which torch.distributed sends objects; pip install numpy")


PP = Wrapper("pp", _wrap, ranks=2, axes=("stage",), alike=False, check=_check, owned=operator.attrgetter("owned"))
