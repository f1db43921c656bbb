"""WholeStep: forward, loss and backward as one call, so that a compiler sees a training step as one graph.

The optimiser has no part in it: ``torch.optim.Optimizer.step`` breaks the graph on purpose, before and behind its work
(``_use_grad_for_differentiable`` in torch/optim/optimizer.py, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_torchcompile.errors import InstrumentError, UsageError
from pytest_torchcompile.oracle.recording import StepOutput
from pytest_torchcompile.oracle.training import loss_of
from pytest_torchcompile.state.value_leaves import leaves_of

__all__ = ["WholeStep", "compile_step", "why_no_step"]

_BREAKING = ("2.11.", "2.12.")
"""Versions of torch that have the setting and cannot trace a step with it."""


class WholeStep(torch.nn.Module):
    """A training step of a model, which returns what it computed.

    Its parameters and buffers have the names that they have in the model.
    """

    def __init__(self, model: torch.nn.Module, loss: Callable[[Any, Any], Any] | None = None) -> None:
        """Take a model and ``loss(output, batch)``; None: a weighted mean over all float outputs."""
        super().__init__()
        self.model, self.loss = model, loss
        self.train(model.training)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those of the model."""
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the model."""
        return self.model.named_buffers(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> StepOutput:
        """What :meth:`compute` gives."""
        return StepOutput(self.compute(*args, **kwargs))

    def compute(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Outputs by their paths, ``loss of the step``, and ``gradient of up.weight`` where a parameter gets one.

        Raises :class:`UsageError` where there is nothing to differentiate.
        """
        wanted = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        with torch.enable_grad():
            output = self.model(*args, **kwargs)
            loss = loss_of(self.loss, output, _value_of(args, kwargs))
            if loss is None or not wanted:
                raise UsageError("a whole step is forward, loss and backward, and of this model there is no loss, or "
                                 "no parameter wants a gradient")
            gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        found: dict[str, Any] = {}
        for path, leaf in leaves_of(output)[0]:
            found[f"output{path}"] = leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
        found["loss of the step"] = loss.detach()
        for name, gradient in zip(wanted, gradients, strict=True):
            if gradient is not None:
                found[f"gradient of {name}"] = gradient
        return found


def _value_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the loss is given beside the output: see :class:`~pytest_torchcompile.batch.Batch`."""
    if not kwargs:
        return args[0] if len(args) == 1 else args
    return (args, kwargs) if args else kwargs


def why_no_step() -> str:
    """Why this torch can't trace a whole step; empty where it can.

    Private: ``torch._dynamo.config.trace_autograd_ops`` (torch 2.11 and 2.13). With it torch 2.11 traces
    ``torch.autograd.grad``, and still breaks the graph at ``torch.utils._pytree.tree_flatten_with_path(is_leaf=...)``,
    by which our loss and many others find the tensors of an output. Torch 2.12, untried, is taken for the same.
    """
    if hasattr(torch._dynamo.config, "trace_autograd_ops") and not torch.__version__.startswith(_BREAKING):
        return ""
    return (f"torch {torch.__version__} cannot trace through torch.autograd.grad and what a training step has around "
            "it; `capture: step` needs torch 2.13, and `capture: joint` has forward and backward in one graph too")


def compile_step(step: WholeStep, settings: dict[str, Any] | None) -> Callable[..., Any]:
    """The step as ``torch.compile(**settings)`` makes it, with Dynamo tracing through its backward pass; None: eager.

    Raises :class:`InstrumentError` where this torch can't.
    """
    if settings is None:
        return step
    if why := why_no_step():
        raise InstrumentError(why)
    compiled = torch.compile(step.compute, **settings)

    def run(*args: Any, **kwargs: Any) -> StepOutput:
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            return StepOutput(compiled(*args, **kwargs))

    return run
