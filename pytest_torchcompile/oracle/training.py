"""Training: k steps of forward, backward and SGD as one program, so that its rounding noise is measured as a whole.

SGD, because it hands errors on as they are. Adam divides each gradient by its own size, so that a gradient of
nothing but rounding noise becomes a full step, and correct compilers look wrong.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.gauges.replays import step_begins
from pytest_torchcompile.oracle.leaf import Leaf
from pytest_torchcompile.oracle.losses import loss_of
from pytest_torchcompile.oracle.ownership import run_theirs
from pytest_torchcompile.oracle.recording import Recording, detached_copy
from pytest_torchcompile.oracle.replicas import average_gradients, losses_of_others
from pytest_torchcompile.state.paths import leaves_of

__all__ = ["Training", "learning_rate", "no_loss", "rename_steps", "role_of", "steps_of"]

_STEP = 0.01
"""How far the first step goes, relative to the size of all parameters."""


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
        self.__dict__["call"] = call

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those of the model."""
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the model."""
        return self.model.named_buffers(*args, **kwargs)

    def forward(self, **batches: Any) -> dict[str, dict[str, Any]]:
        """Train on one batch after another."""
        also: dict[str, list[Batch]] = {step: [] for step in batches if _REPLICA not in step}
        for name, value in batches.items():
            if _REPLICA in name:
                also[name.partition(_REPLICA)[0]].append(Batch.of(value))
        return {step: self._step(Batch.of(batches[step]), others) for step, others in also.items()}

    def _step(self, batch: Batch, also: Sequence[Batch]) -> dict[str, Any]:
        call = self.model if self.__dict__["call"] is None else self.__dict__["call"]
        others = losses_of_others(call, self.model, also, lambda out, each: loss_of(self.loss, out, each.value))
        step_begins()
        output = run_theirs(call, *batch.args, **batch.kwargs)
        found = {f"output{path}": leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
                 for path, leaf in leaves_of(output)[0]}
        loss = loss_of(self.loss, output, batch.value)
        if loss is not None and loss.requires_grad:
            found["loss"] = loss.detach().clone()
            run_theirs(torch.autograd.backward, [loss, *others])
        if also:
            average_gradients((p for _, p in self.named_parameters()), 1 + len(also))
        with torch.no_grad():
            with self.whole():
                for name, parameter in self.named_parameters():
                    if name in self.silent:
                        continue
                    if parameter.grad is not None:
                        found[f"gradient of {name}"] = detached_copy(parameter.grad)
                    elif name not in self.others:
                        found[f"gradient of {name}"] = None
            for _, parameter in self.named_parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-self.rate)
                    parameter.grad = None
        for tensor in batch.tensors() if self.copied else ():
            if tensor.is_leaf and tensor.grad is not None:
                tensor.grad = tensor.grad.clone()
        return found


_REPLICA = ", replica "


def steps_of(batches: Iterable[Sequence[Batch]]) -> Batch:
    """What :class:`Training` is called with: copies of the batches, the first for the first step.

    Of each step the first batch is the own one; others are those of other replicas.
    """
    values: Mapping[str, Any] = {
        f"step {i + 1}" + (f"{_REPLICA}{k + 1}" if k else ""): batch.clone().value
        for i, replicas in enumerate(batches) for k, batch in enumerate(replicas)
    }
    return Batch.of(values)


def learning_rate(module: torch.nn.Module, first: Recording) -> float:
    """A learning rate, a power of two, with which the first step moves the parameters by about a hundredth.

    0 where there is nothing to move or no gradient that moves it.
    """
    gradients = [g for name, g in first.gradients.items() if g is not None and not name.startswith("gradient of input")]
    moved, size = _norm(gradients), _norm(p.detach() for p in module.parameters())
    if not (0 < moved < math.inf and size < math.inf):
        return 0.0
    return 2.0 ** round(math.log2(_STEP * (size or 1.0) / moved))


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors if t.is_floating_point()))


def no_loss(output: Any, value: Any) -> torch.Tensor:
    """The loss of :class:`Training` itself, which has done its backward passes."""
    return torch.zeros(())


_STEPS = re.compile(r"""output\['(step \d+)'\]\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]""")


def role_of(name: str, kind: str) -> str:
    """The kind of a value that a training returns: its gradients are entries of its output."""
    step = _STEPS.fullmatch(name)
    return "gradient" if step is not None and step[2][1:].startswith("gradient of ") else kind


def rename_steps(leaves: Iterable[Leaf], steps: int) -> Iterator[Leaf]:
    """Leaves of a training in the words of the other ones: ``step 2: gradient of up.weight``."""
    for leaf in leaves:
        name = leaf.name
        if name == "loss":
            continue
        if _STEPS.match(name):  # more than once where a leaf is of two gradients: that they share memory, say
            name = _STEPS.sub(lambda match: f"{match[1]}: {ast.literal_eval(match[2])}", name)
        elif name.endswith(" after the call"):
            name = f"{name.removesuffix(' after the call')} after {steps} steps"
        yield replace(leaf, name=name)
