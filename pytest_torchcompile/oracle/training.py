"""Training: k steps of forward, backward and SGD as one program, so that its rounding noise is measured as a whole.

First the loss: of a model that names none, and the check of what a user's loss returned.

SGD, because it hands errors on as they are. Adam divides each gradient by its own size, so that a gradient of
nothing but rounding noise becomes a full step, and correct compilers look wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from torch.autograd.graph import get_gradient_edge

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.gauges.replays import step_begins
from pytest_torchcompile.oracle.leaf_limits import Leaf
from pytest_torchcompile.oracle.measurement import read_numbers
from pytest_torchcompile.oracle.recording import (
    Recording,
    Step,
    TrainingOutput,
    detached_copy,
    parameter_moved_by,
    run_theirs,
)
from pytest_torchcompile.oracle.same_values import names_of_differing
from pytest_torchcompile.oracle.spread import NOT_SPREAD, Spread, average_gradients, losses_of_others
from pytest_torchcompile.state.tensor_forms import dense_form, distinct_numbers
from pytest_torchcompile.state.value_leaves import leaves_of

__all__ = ["BY_LEFT_OUT", "Training", "default_loss", "first_step", "learning_rate", "left_out", "loss_of",
           "need_second_pass", "no_loss", "parameters_told_by_gradients", "rename_leaves", "steps_of"]

BY_LEFT_OUT: Final = " by outputs that the loss leaves out"
"""Ends the name of a gradient that comes of a further backward pass: through the outputs that the loss does not use."""


def need_second_pass(names: Iterable[str]) -> bool:
    """Whether one of some leaves comes of a second forward and backward pass, through what the loss leaves out."""
    return any(name.endswith(BY_LEFT_OUT) for name in names)


def default_loss(output: Any, value: Any = None) -> torch.Tensor | None:
    """Weighted mean of y^2 + y over every floating output, averaged; ``None`` where there is none.

    The weights are fixed numbers from 0.5 to 1.5, one per element, exact in every dtype. Without
    them the mean square of a normalised output (layer norm, batch norm) would be a constant, and every
    gradient before it nothing but rounding noise. Without the linear term an output that is zero, as that of a last
    layer that begins with zeros, would have no gradient at all. Elements that are not finite (masked logits) count as
    zero. Half precision is summed in float32.
    """
    terms = []
    for _, leaf in leaves_of(output)[0]:
        if not isinstance(leaf, torch.Tensor) or not leaf.numel():
            continue
        leaf = dense_form(leaf)
        if leaf.is_floating_point() or leaf.is_complex():
            if leaf.is_complex():
                leaf = torch.view_as_real(leaf.resolve_conj())
            if leaf.dtype.itemsize < 4:
                leaf = leaf.float()
            leaf = leaf.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            terms.append(((leaf.square() + leaf) * _weights_like(leaf)).mean())
    if not terms:
        return None
    return torch.stack(terms).mean()


def loss_of(loss: Callable[[Any, Any], Any] | None, output: Any, value: Any) -> torch.Tensor | None:
    """Call the model's loss, or the default one.

    Raises:
        UsageError: a loss that is no tensor of one element.
    """
    if loss is None:
        return default_loss(output, value)
    returned = run_theirs(loss, output, value)
    if isinstance(returned, torch.Tensor) and returned.numel() == 1:
        return returned.reshape(())
    shown = type(returned).__name__
    if isinstance(returned, torch.Tensor):
        shown = f"a tensor of shape {tuple(returned.shape)}"
    name = getattr(loss, "__qualname__", repr(loss))
    raise UsageError(
        f"loss {name!r} returned {shown}, expected a tensor of one element: reduce it with .mean()"
    )


def left_out(loss: torch.Tensor, outputs: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, ...]:
    """Names of the outputs that want a gradient and get none from ``loss`` itself.

    An output that only feeds another one inside the model gets none here either: compiled, both are results of one
    function, and the gradient of each takes its own way through it. Walks the graph of the loss from its end to the
    outputs (``torch.autograd.graph.get_gradient_edge``, torch 2.1 and later).
    """
    edges: dict[tuple[Any, int], list[str]] = {}
    for name, tensor in outputs:
        if tensor.requires_grad:
            edges.setdefault(_gradient_edge(tensor), []).append(name)
    reached: set[tuple[Any, int]] = set()
    passed = set()
    waiting = [_gradient_edge(loss)]
    while waiting:
        edge = waiting.pop()
        if edge in edges:
            # Not beyond it: what only feeds this output gets no gradient of the loss itself.
            reached.add(edge)
        elif edge[0] is not None and edge[0] not in passed:
            passed.add(edge[0])
            waiting += edge[0].next_functions
    unreached: list[str] = []
    for edge, names in edges.items():
        if edge not in reached:
            unreached += names
    return tuple(unreached)


def _gradient_edge(tensor: torch.Tensor) -> tuple[Any, int]:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _weights_like(like: torch.Tensor) -> torch.Tensor:
    """32/64 to 95/64, scattered over the elements by a multiplicative hash of their position."""
    steps = torch.arange(like.numel(), device=like.device).mul_(40503)
    steps = steps.bitwise_right_shift_(4).bitwise_and_(63)
    # a table look-up, not arithmetic, so that the weights are the same numbers in every precision; and made there, for
    # a copy from the CPU waits for a GPU
    table = torch.arange(0.5, 1.5, 1 / 64, dtype=like.dtype, device=like.device)
    return table[steps].view(like.shape)


# -------------------------------------------------------------------------------------------------------------- k steps
# How far the first step goes, relative to the size of all parameters.
_FIRST_STEP = 0.01
_AFTER_CALL = " after the call"


class Training(torch.nn.Module):
    """k training steps of a model as one call, which returns what each step computed.

    Its parameters and buffers have the names that they have in the model.
    """

    def __init__(self, model: torch.nn.Module, call: Callable[..., Any] | None, loss: Any, rate: float,
                 copied: bool = False, spread: Spread = NOT_SPREAD, silent: frozenset[str] = frozenset(),
                 accumulated: bool = False) -> None:
        """Take a model and how it is trained.

        Args:
            model: Has the parameters.
            call: Runs the model; None: the model itself (of a copy: its own).
            loss: As for ``record``.
            rate: Learning rate.
            copied: Gradients that are still there are copied before the next step, which may write to their memory
                (CUDA graphs); else what it does to them is seen.
            spread: How the model is spread over ranks. That parameters of another rank get no gradient is not told.
            silent: Parameters whose gradients are not told.
            accumulated: The last step adds its gradients to those of the step before.
        """
        super().__init__()
        self.model, self.loss, self.rate, self.copied, self.silent = model, loss, rate, copied, silent
        self.accumulated = accumulated
        # Not as an attribute: a call that is a module would become a submodule, and its parameters ours.
        self.__dict__["call"] = call
        # After the call, by which what both hold is named.
        self.spread = spread

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those of the model."""
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the model."""
        return self.model.named_buffers(*args, **kwargs)

    def is_trained(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether steps move a parameter of this rank, if it gets a gradient."""
        return parameter.requires_grad and name not in self.spread.names_elsewhere

    def forward(self, **batches: Any) -> TrainingOutput:
        """Train on one batch after another; keywords as :func:`steps_of` makes them."""
        ordered: list[Batch] = []
        while batch := _batch_of_step(batches, len(ordered)):
            ordered.append(batch)
        steps: list[Step] = []
        last = len(ordered) - 1
        for number, batch in enumerate(ordered):
            added_to = ""
            if self.accumulated and number and number == last:
                added_to = _step_name(number - 1)
            keeps_gradients = self.accumulated and number + 1 == last
            steps.append(self._train_step(_step_name(number), batch, added_to, keeps_gradients))
        return TrainingOutput(steps)

    def _train_step(self, name: str, batch: Batch, added_to: str, keeps_gradients: bool) -> Step:
        call = self.model if self.__dict__["call"] is None else self.__dict__["call"]
        others = losses_of_others(call, self.model, batch, lambda out, each: loss_of(self.loss, out, each.for_loss))
        step_begins()
        output = run_theirs(call, *batch.args, **batch.kwargs)
        outputs = {}
        for path, leaf in leaves_of(output)[0]:
            # A copy before the backward pass: a replayed CUDA graph may reuse the memory of an output.
            outputs[f"output{path}"] = leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        loss, kept_loss = loss_of(self.loss, output, batch.for_loss), None
        if loss is not None and loss.requires_grad:
            kept_loss = loss.detach().clone()
            run_theirs(torch.autograd.backward, [loss, *others])
        average_gradients((parameter for _, parameter in self.named_parameters()), batch)
        with torch.no_grad():
            gradients = self._copy_gradients()
            self._move_parameters()
        if not keeps_gradients:
            self._drop_gradients()
        if self.copied:
            _copy_kept_gradients([*self.model.parameters(), *batch.tensors()])
        return Step(name, outputs, kept_loss, gradients, added_to)

    def _copy_gradients(self) -> dict[str, torch.Tensor | None]:
        gradients: dict[str, torch.Tensor | None] = {}
        with self.spread.whole():
            for name, parameter in self.named_parameters():
                if name in self.silent:
                    continue
                if parameter.grad is not None:
                    gradients[name] = detached_copy(parameter.grad)
                elif name not in self.spread.names_elsewhere:
                    gradients[name] = None
        return gradients

    def _move_parameters(self) -> None:
        for _, parameter in self.named_parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-self.rate)

    def _drop_gradients(self) -> None:
        for _, parameter in self.named_parameters():
            parameter.grad = None


def _copy_kept_gradients(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_leaf and tensor.grad is not None:
            tensor.grad = tensor.grad.clone()


def first_step(name: str) -> str:
    """How a leaf of a call is called in a training that begins with it."""
    return f"{_step_name(0)}: {name}"


def _step_name(number: int, replica: int = 0) -> str:
    """The keyword of a batch, and the path of its tensors in a report. Numbers begin with 0, names with 1."""
    if replica == 0:
        return f"step {number + 1}"
    return f"step {number + 1}, replica {replica + 1}"


def steps_of(batches: Iterable[Batch]) -> Batch:
    """What :class:`Training` is called with: copies of the batches, the first for the first step.

    Those of other replicas are inputs like any other here: all of them together are one program.
    """
    values: dict[str, Any] = {}
    for number, batch in enumerate(batches):
        for replica, own in enumerate(batch.replicas):
            values[_step_name(number, replica)] = own.clone().value
    return Batch.of(values)


def _batch_of_step(values: dict[str, Any], number: int) -> Batch | None:
    """The batch of one step again, with those of other replicas; None after the last step."""
    replicas: list[Batch] = []
    while (name := _step_name(number, len(replicas))) in values:
        replicas.append(Batch.of(values[name]))
    if not replicas:
        return None
    own, *others = replicas
    return replace(own, other_replicas=tuple(others))


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
    # In float64: of many half precision values a sum of squares would overflow.
    numbers = [distinct_numbers(tensor) for tensor in tensors if tensor.is_floating_point()]
    squares = [stored.double().square().sum() for stored in numbers]
    return math.sqrt(sum(read_numbers(*squares)))


def no_loss(output: Any, value: Any) -> torch.Tensor:
    """The loss of :class:`Training` itself, which has done its backward passes."""
    return torch.zeros(())


def parameters_told_by_gradients(
    recordings: Iterable[Recording], model: torch.nn.Module, rate: float
) -> frozenset[str]:
    """Of recordings of a training: names of leaves of parameters that say no more than the gradients of the steps do.

    ``model`` holds the parameters from before the steps. Those are moved by the gradients, as the steps have done it:
    where that gives a leaf bit by bit, it can only be wrong if a gradient is. A call that writes to a parameter itself
    has more to tell.
    """
    told = [_told_by_gradients(recording, model, rate) for recording in recordings]
    return frozenset(set.intersection(*told))


def _told_by_gradients(recording: Recording, model: torch.nn.Module, rate: float) -> set[str]:
    gradients: dict[str, list[torch.Tensor]] = {}
    for name, _, value in recording.values():
        if isinstance(value, torch.Tensor):
            gradients.setdefault(parameter_moved_by(name), []).append(value)
    leaves = {f"{name}{_AFTER_CALL}": parameter for name, parameter in model.named_parameters()}
    left = {leaf: parameter for leaf, parameter in leaves.items() if leaf in recording.mutated}

    def moved_and_found() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for leaf, parameter in left.items():
            moved = detached_copy(parameter)
            for gradient in gradients.get(leaf.removesuffix(_AFTER_CALL), []):
                if gradient.shape == moved.shape:
                    moved.add_(gradient, alpha=-rate)
            yield leaf, moved, recording.mutated[leaf]

    return set(left) - names_of_differing(moved_and_found())


def rename_leaves(leaves: Iterable[Leaf], steps: int) -> Iterator[Leaf]:
    """Leaves of a training: what a call has left behind, it has left after all steps. Its own loss says nothing.

    A parameter is as far off as the gradients that moved it: of one of nothing but noise its steps are noise too.
    """
    leaves = list(leaves)
    noise = {parameter_moved_by(leaf.name) for leaf in leaves if not leaf.decided}
    for leaf in leaves:
        if leaf.name == "loss":
            continue
        if leaf.name.endswith(_AFTER_CALL):
            name = leaf.name.removesuffix(_AFTER_CALL)
            leaf = replace(leaf, name=f"{name} after {steps} steps")
            if name in noise and leaf.numerical:
                leaf = replace(leaf, moved_by_noise=True)
        yield leaf
