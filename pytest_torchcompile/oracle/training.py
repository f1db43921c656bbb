"""Training: k steps of forward, backward and SGD as one program, so that its rounding noise is measured as a whole.

SGD, because it hands errors on as they are. Adam divides each gradient by its own size, so that a gradient of
nothing but rounding noise becomes a full step, and correct compilers look wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.gauges.replays import step_begins
from pytest_torchcompile.oracle.leaf import Leaf
from pytest_torchcompile.oracle.losses import loss_of
from pytest_torchcompile.oracle.ownership import run_theirs
from pytest_torchcompile.oracle.recording import Recording, Step, TrainingOutput, detached_copy
from pytest_torchcompile.oracle.replicas import average_gradients, losses_of_others
from pytest_torchcompile.state.paths import leaves_of

__all__ = ["Training", "learning_rate", "no_loss", "rename_leaves", "steps_of"]

# How far the first step goes, relative to the size of all parameters.
_FIRST_STEP = 0.01
_AFTER_CALL = " after the call"


class Training(torch.nn.Module):
    """k training steps of a model as one call, which returns what each step computed.

    Its parameters and buffers have the names that they have in the model.
    """

    def __init__(self, model: torch.nn.Module, call: Callable[..., Any] | None, loss: Any, rate: float,
                 copied: bool = False, whole: Callable[[], AbstractContextManager[Any]] = nullcontext,
                 silent: frozenset[str] = frozenset(), others: frozenset[str] = frozenset()) -> None:
        """Take a model and how it is trained.

        Args:
            model: Has the parameters.
            call: Runs the model; None: the model itself (of a copy: its own).
            loss: As for ``record``.
            rate: Learning rate.
            copied: Gradients of inputs are copied before the next step, which may write to their memory (CUDA graphs);
                else what it does to them is seen.
            whole: As for ``record``.
            silent: Parameters whose gradients are not told.
            others: Parameters that are another rank's: that they get no gradient here is not told either.
        """
        super().__init__()
        self.model, self.loss, self.rate, self.copied, self.whole = model, loss, rate, copied, whole
        self.silent, self.others = silent, others
        # Not as an attribute: a call that is a module would become a submodule, and its parameters ours.
        self.__dict__["call"] = call

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those of the model."""
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the model."""
        return self.model.named_buffers(*args, **kwargs)

    def forward(self, **batches: Any) -> TrainingOutput:
        """Train on one batch after another; keywords as :func:`steps_of` makes them."""
        steps: list[Step] = []
        while replicas := _batches_of_step(batches, len(steps)):
            own, *others = replicas
            steps.append(self._train_step(_step_name(len(steps)), own, others))
        return TrainingOutput(steps)

    def _train_step(self, name: str, batch: Batch, also: Sequence[Batch]) -> Step:
        call = self.model if self.__dict__["call"] is None else self.__dict__["call"]
        others = losses_of_others(call, self.model, also, lambda out, each: loss_of(self.loss, out, each.value))
        step_begins()
        output = run_theirs(call, *batch.args, **batch.kwargs)
        outputs = {}
        for path, leaf in leaves_of(output)[0]:
            # A copy before the backward pass: a replayed CUDA graph may reuse the memory of an output.
            outputs[f"output{path}"] = leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        loss, kept_loss = loss_of(self.loss, output, batch.value), None
        if loss is not None and loss.requires_grad:
            kept_loss = loss.detach().clone()
            run_theirs(torch.autograd.backward, [loss, *others])
        if also:
            average_gradients((parameter for _, parameter in self.named_parameters()), 1 + len(also))
        with torch.no_grad():
            gradients = self._copy_gradients()
            self._move_parameters()
        if self.copied:
            _copy_input_gradients(batch)
        return Step(name, outputs, kept_loss, gradients)

    def _copy_gradients(self) -> dict[str, torch.Tensor | None]:
        gradients: dict[str, torch.Tensor | None] = {}
        with self.whole():
            for name, parameter in self.named_parameters():
                if name in self.silent:
                    continue
                if parameter.grad is not None:
                    gradients[name] = detached_copy(parameter.grad)
                elif name not in self.others:
                    gradients[name] = None
        return gradients

    def _move_parameters(self) -> None:
        for _, parameter in self.named_parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-self.rate)
                parameter.grad = None


def _copy_input_gradients(batch: Batch) -> None:
    for tensor in batch.tensors():
        if tensor.is_leaf and tensor.grad is not None:
            tensor.grad = tensor.grad.clone()


def _step_name(number: int, replica: int = 0) -> str:
    """The keyword of a batch, and the path of its tensors in a report. Numbers begin with 0, names with 1."""
    if replica == 0:
        return f"step {number + 1}"
    return f"step {number + 1}, replica {replica + 1}"


def steps_of(batches: Iterable[Sequence[Batch]]) -> Batch:
    """What :class:`Training` is called with: copies of the batches, the first for the first step.

    Of each step the first batch is the own one; others are those of other replicas.
    """
    values: dict[str, Any] = {}
    for number, replicas in enumerate(batches):
        for replica, batch in enumerate(replicas):
            values[_step_name(number, replica)] = batch.clone().value
    return Batch.of(values)


def _batches_of_step(values: dict[str, Any], number: int) -> list[Batch]:
    """The batches of one step again, the own one first; none after the last step."""
    batches: list[Batch] = []
    while (name := _step_name(number, len(batches))) in values:
        batches.append(Batch.of(values[name]))
    return batches


def learning_rate(module: torch.nn.Module, first: Recording) -> float:
    """A learning rate, a power of two, with which the first step moves the parameters by about a hundredth.

    0 where there is nothing to move or no gradient that moves it.
    """
    gradients = []
    for name, gradient in first.gradients.items():
        if gradient is not None and not name.startswith("gradient of input"):
            gradients.append(gradient)
    moved, size = _norm_of(gradients), _norm_of(parameter.detach() for parameter in module.parameters())
    if not (0 < moved < math.inf and size < math.inf):
        return 0.0
    return 2.0 ** round(math.log2(_FIRST_STEP * (size or 1.0) / moved))


def _norm_of(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors if t.is_floating_point()))


def no_loss(output: Any, value: Any) -> torch.Tensor:
    """The loss of :class:`Training` itself, which has done its backward passes."""
    return torch.zeros(())


def rename_leaves(leaves: Iterable[Leaf], steps: int) -> Iterator[Leaf]:
    """Leaves of a training: what a call has left behind, it has left after all steps. Its own loss says nothing."""
    for leaf in leaves:
        if leaf.name == "loss":
            continue
        if leaf.name.endswith(_AFTER_CALL):
            leaf = replace(leaf, name=f"{leaf.name.removesuffix(_AFTER_CALL)} after {steps} steps")
        yield leaf
