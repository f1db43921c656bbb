"""A training step: what a smoketest refuses one for, each check raises :class:`StepFailed` with the words for it.

And what a step needs: a loss of any convention, the gradients of a run, an optimiser or plain descent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import short_line
from pytest_torchcompile.ledger import Ledger
from pytest_torchcompile.ledger.records import SILENT
from pytest_torchcompile.oracle import Fault, Recording, default_loss
from pytest_torchcompile.quantity import numbered
from pytest_torchcompile.state.tensor_forms import computable

__all__ = [
    "Descent",
    "LeftGradients",
    "OptimizerStep",
    "StepFailed",
    "adapted_loss",
    "compiler_failure",
    "has_finite_values",
    "is_finite",
    "left_alone",
    "loss_of_step",
    "refuse_differences",
    "refuse_eager_parts",
    "refuse_not_finite",
    "refuse_user_error",
]

_TEXT_LENGTH = 300
"""Characters of an error's text that a reason quotes."""


class StepFailed(Exception):
    """Why a smoketest ends."""

    def __init__(
        self, reason: str, phase: str, step: int = 0, evidence: str = "", user_error: BaseException | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.phase, self.step, self.evidence, self.user_error = reason, phase, step, evidence, user_error


# what was raised


def left_alone(
    error: BaseException | None, missing: tuple[int, ...], departed: tuple[int, ...], step: int
) -> StepFailed:
    """A call that the ranks ``missing`` do not end, or after which those that ``departed`` make no more.

    ``error`` is what this rank's call ended with.
    """
    ranks = numbered("rank", missing)
    if set(missing) <= set(departed):
        why = f"{ranks} had to leave the same call, and the log there says why"
    else:
        why = (f"{ranks} did not end the same call, and may wait for this rank in a collective until this process ends "
               "or the process group's time-out")
    if error is None:
        return StepFailed(why, "rank", step)
    raised = error
    if isinstance(error, StepFailed) and error.user_error is not None:
        raised = error.user_error
    text = short_line(str(raised), _TEXT_LENGTH)
    return StepFailed(f"the model raises {type(raised).__name__} on this rank: {text}; {why}", "forward", step,
                      user_error=raised)


def refuse_user_error(fault: Fault | None, step: int, batch: Batch) -> None:
    """Refuse what eager raised, called with ``batch``."""
    if fault is not None:
        raise _user_failure(fault, step, batch)


def _user_failure(fault: Fault, step: int, batch: Batch) -> StepFailed:
    # The test holds copies, so that eager alone might have had room enough: nobody's error.
    if isinstance(fault.exception, torch.OutOfMemoryError):
        return StepFailed("not enough memory for the test, which holds two more copies of the model", "state", step,
                          fault.traceback)
    if fault.ours:
        return StepFailed(f"the test itself failed, which is no fault of the model: {_described(fault)}", fault.phase,
                          step, fault.traceback)
    # Here, for a model that raises nothing needs none of it.
    from pytest_torchcompile.oracle import given_text, whose_code

    reason = f"{whose_code(fault)} raises without torch.compile too: {_described(fault)}"
    if given := given_text(fault, batch):
        reason = f"{reason}; {given}"
    return StepFailed(reason, fault.phase, step, fault.traceback, fault.exception)


def compiler_failure(fault: Fault, step: int) -> StepFailed:
    """What a compiled run raised, and eager did not."""
    return StepFailed(f"compiled it raises, eagerly it does not: {_described(fault)}", fault.phase, step,
                      fault.traceback)


def _described(fault: Fault) -> str:
    where = f"{fault.type} in {fault.phase}"
    text = short_line(fault.text, _TEXT_LENGTH)
    return f"{where}: {text}" if text else where


# what ran


def refuse_eager_parts(seen: Ledger, graph_runs: int, step: int) -> None:
    """Refuse a compiled run of which a part, or all, ran eagerly without anybody's wish."""
    frames = "\n".join(f"{f.part}  {f.file}:{f.line}  {f.kind}: {f.reason}" for f in seen.eager_frames)
    if seen.failures:
        failures = "\n".join(f"{f.function}  {f.file}:{f.line}  {f.type}: {f.message}" for f in seen.failures)
        raise StepFailed("it did not compile and ran eagerly instead", "forward", step, failures)
    silent = sorted({frame.kind for frame in seen.eager_frames if frame.kind in SILENT})
    if silent:
        raise StepFailed(f"a part silently ran eagerly: {', '.join(silent)}", "forward", step, frames)
    if not graph_runs:
        raise StepFailed("nothing was compiled: the forward pass ran no compiled graph", "forward", step, frames)
    if seen.lost:
        raise StepFailed("what ran compiled could not be told", "forward", step, "\n".join(seen.lost))


# what came of it


def refuse_differences(texts: list[str], step: int) -> None:
    """Refuse leaves that differ, one line each."""
    if texts:
        raise StepFailed(texts[0], "comparison", step, "\n".join(texts))


def refuse_not_finite(compiled: Recording, train: bool, step: int) -> None:
    """Refuse a loss or a gradient that is no number, although it agrees with eager."""
    if train and compiled.loss is not None and not is_finite(compiled.loss):
        raise StepFailed("the loss is not finite, eagerly too", "loss", step)
    for name, gradient in compiled.gradients.items():
        if gradient is not None and not is_finite(gradient):
            raise StepFailed(f"{name} is not finite, eagerly too", "backward", step)


def has_finite_values(recording: Recording) -> bool:
    """Whether loss and gradients are numbers."""
    tensors = [recording.loss, *recording.gradients.values()]
    return all(tensor is None or is_finite(tensor) for tensor in tensors)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    return bool(computable(values).isfinite().all())


# ---------------------------------------------------------------------------------------------------- what a step needs
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


def loss_of_step(
    module: torch.nn.Module, loss_fn: Callable[..., Any] | None, train: bool | None
) -> Callable[..., Any] | None:
    """The loss of a step that is timed or explained; None where it is a forward pass alone.

    ``loss_fn`` and ``train`` as for :func:`pytest_torchcompile.benchmark`.
    """
    if train is None:
        train = loss_fn is not None or is_trained(module)
    if not train:
        return None
    return default_loss if loss_fn is None else adapted_loss(loss_fn)


def is_trained(module: torch.nn.Module) -> bool:
    """Whether its user would expect a training step of it."""
    differentiable = any(parameter.requires_grad for parameter in module.parameters())
    return module.training and torch.is_grad_enabled() and differentiable
