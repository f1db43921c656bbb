"""What a training step needs: a loss of any convention, the gradients of a run, an optimiser or plain descent."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.layer.step_checks import StepFailed, is_finite
from pytest_torchcompile.oracle import Recording

__all__ = ["Descent", "LeftGradients", "OptimizerStep", "adapted_loss"]

_RATE = 1e-2


class Descent:
    """Plain gradient descent. A step is at most 0.01 long, all parameters together, so that no model is thrown off."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def step(self) -> None:
        """Go down; parameters without a gradient stay."""
        moved: list[tuple[nn.Parameter, torch.Tensor]] = []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            # Of an embedding with sparse=True, say.
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            moved.append((parameter, gradient))
        if not moved:
            return
        # The parameters of one model may be on several devices.
        device = moved[0][0].device
        lengths = [gradient.float().norm().to(device) for _, gradient in moved]
        length = torch.stack(lengths).norm()
        rate = float(_RATE / length.clamp(min=1.0))
        for parameter, gradient in moved:
            parameter.add_(gradient, alpha=-rate)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters:
            parameter.grad = None


class LeftGradients:
    """Entered around a run: holds on to the gradients that it leaves, which the record of it drops."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Each parameter with its gradient."""

    def __enter__(self) -> LeftGradients:
        return self

    def __exit__(self, *exc: object) -> None:
        parameters = self.module.parameters()
        self.pairs = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]


class OptimizerStep:
    """Steps of the user's optimiser, or of :class:`Descent` where there is none."""

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        self.module = module
        self.is_users = optimizer is not None
        self._optimizer = Descent(module) if optimizer is None else optimizer

    def take(self, gradients: LeftGradients, eager: Recording, step: int) -> None:
        """Step with the compiled run's gradients, and drop them.

        Raises :class:`StepFailed` where the optimiser raises, or leaves a parameter that is not finite.
        """
        for parameter, gradient in gradients.pairs:
            parameter.grad = gradient
        try:
            self._step(eager)
        except Exception as error:
            raise self._failure(error, eager, step) from error
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and not is_finite(parameter):
                raise StepFailed(f"parameter {name} is not finite after the optimiser's step", "step", step)
        self._optimizer.zero_grad()

    def _failure(self, error: Exception, eager: Recording, step: int) -> StepFailed:
        """Whose fault it is that the optimiser raises: it is asked again with eager's gradients."""
        for name, parameter in self.module.named_parameters():
            parameter.grad = eager.gradients.get(f"gradient of {name}")
        kind = type(error).__name__
        try:
            self._step(eager)
        except Exception:
            return StepFailed(f"the optimiser raises {kind}, eagerly too: {error}", "step", step, user_error=error)
        return StepFailed(f"the optimiser raises {kind} for the compiled gradients, for those of eager it does not: "
                          f"{error}", "step", step)

    def _step(self, eager: Recording) -> None:
        # It asks for a closure, and gets the loss that is known already.
        if type(self._optimizer) is torch.optim.LBFGS:
            self._optimizer.step(lambda: eager.loss)  # type: ignore[no-untyped-call]
        else:
            self._optimizer.step()


def adapted_loss(loss_fn: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """``loss_fn(output)`` as ``loss_fn(output, batch)``; of a tuple or a dict that it returns the loss alone."""
    takes_output_alone = _takes_one_argument(loss_fn)

    def loss(output: Any, value: Any) -> Any:
        result = loss_fn(output) if takes_output_alone else loss_fn(output, value)
        if isinstance(result, (tuple, list)) and result:
            return result[0]
        if isinstance(result, Mapping) and "loss" in result:
            return result["loss"]
        return result

    # Error texts name the loss by this.
    loss.__qualname__ = getattr(loss_fn, "__qualname__", type(loss_fn).__name__)
    return loss


def _takes_one_argument(function: Callable[..., Any]) -> bool:
    if isinstance(function, nn.Module):
        function = function.forward
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Written in C.
        return False
    try:
        signature.bind(None, None)
    except TypeError:
        return True
    return False
