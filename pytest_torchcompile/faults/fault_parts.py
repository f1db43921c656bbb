"""What planted faults are put together from: the record of a case, and the ways to make a tensor, a graph or a backend
wrong.

A case is one planted fault, or one correct backend that rounds differently, as data. The first spoilers give what
``Case.backend`` wants: something that makes a backend, anew for each run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, fx

from pytest_torchcompile.backends.toolkit import Pass, Runner, Toolkit, drop, edit, replace, results, toolkit
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.drawn_call import DrawnCall
from pytest_torchcompile.quantity import named_sizes

__all__ = [
    "KINDS",
    "Case",
    "Program",
    "change_gradient",
    "change_in_runs",
    "change_output",
    "change_results",
    "change_returned",
    "drop_in_backward",
    "drop_operator",
    "first_scaled",
    "named_backend",
    "one_element",
    "rounded_to",
    "scaled_by",
    "settings_are_of_one_thread",
    "shift_constant",
    "swap_in_backward",
    "swap_operator",
]

KINDS: Final = (
    "value", "dtype", "shape", "stride", "alias", "mutation", "requires_grad", "gradient", "buffer", "error",
    "vacuous", "rng", "structure", "nondeterministic", "graph_break", "recompile", "memory", "code", "guards",
)  # fmt: skip
"""The kinds of problems that ``compare`` reports, then those that the other checks are for."""


def untouched() -> Any:
    """The backend that changes nothing."""
    return toolkit


@dataclass(frozen=True)
class Program:
    """A model and the calls on which a fault shows."""

    model: Callable[[], torch.nn.Module]
    inputs: Callable[..., Any]
    """Called with one entry of ``sizes`` as keywords, gives one batch."""
    sizes: tuple[Mapping[str, int], ...] = ({"B": 8},)
    dtype: torch.dtype = torch.float32
    training: bool = True
    """``model.train()`` or ``model.eval()``; gradients are computed either way."""
    device: str = "cpu"
    loss: Callable[[Any, Any], Any] | None = None
    """``loss(output, batch)``; None: the one that ``compare`` makes up."""
    cpu_only: str = ""
    """Why it is not run elsewhere."""

    def __str__(self) -> str:
        calls = map(named_sizes, self.sizes)
        dtype = str(self.dtype).removeprefix("torch.")
        text = f"{self.model.__name__} of {self.inputs.__name__} ({'; '.join(calls)}), {dtype}"
        if not self.training:
            text += ", evaluation"
        return text

    def build_model(self) -> torch.nn.Module:
        """The model with the same parameters each time."""
        torch.manual_seed(0)
        return self.model().to(self.device, self.dtype).train(self.training)

    def make_calls(self) -> list[Batch]:
        """One batch for each entry of ``sizes``, the same each time."""
        # Another seed than the model's: batches made of the numbers of its parameters would be no random ones.
        torch.manual_seed(1)
        return [Batch.of(self.inputs(**sizes)).to(device=self.device, dtype=self.dtype) for sizes in self.sizes]


@dataclass(frozen=True)
class Case:
    """What is wrong (or only different), where it shows, and what must be said about it."""

    name: str
    says: str
    """What it breaks; of a correct one, what it computes differently."""
    program: Program
    kind: str = ""
    """One of ``KINDS``: what must be reported. Empty: it is correct, and nothing may be reported."""
    backend: Callable[[], Any] = untouched
    """Makes what ``torch.compile(backend=...)`` is given, anew for each run: a wrong backend may have a memory."""
    where: str = ""
    """Must be in the name of a place that is reported: the output, parameter or buffer that is wrong."""
    alone: bool = False
    """Is everything else right, so that nothing else may be reported?"""
    check: str = "compare"
    """What must catch it: ``compare``, or a check of the matrix."""
    dynamic: bool | None = None
    history: Sequence[DrawnCall] = ()
    """For the check ``contract``: the calls in which it shows. Each has the first sizes of the program."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """What a check of the matrix judges by, beside its own limits."""
    steps: int = 1
    below: str = ""
    """Why rounding excuses it: such a fault counts neither as caught nor as missed."""
    control: bool = False
    """Is it a program as it is, to show that nothing but the fault is reported? Then it may equal eager bit by bit."""
    upstream: str = ""
    """Torch's own fault, with its issue: a torch in which it is mended has nothing to catch."""
    has_fault: Callable[[], bool] | None = None
    """Asks this torch whether it has the fault of torch's own, where no comparison of tensors shows it."""
    inductor: bool = False
    """Does it need Inductor, and so a C++ compiler?"""


def settings_are_of_one_thread() -> bool:
    """Whether a thread is without a setting that another one makes."""
    seen: list[int] = []
    reader = threading.Thread(target=lambda: seen.append(torch._dynamo.config.recompile_limit))
    with torch._dynamo.config.patch(recompile_limit=64):
        reader.start()
        reader.join()
    return seen != [64]


# ------------------------------------------------------------------------------------------------------------- spoilers
Change = Callable[[Tensor], Any]
MakeBackend = Callable[[], Toolkit]


def named_backend(name: str) -> Callable[[], str]:
    """One of torch's own backends, by its name."""
    return partial(str, name)


# In Dynamo's graph, before there is a backward: the backward is derived from what is left, so it is as wrong.


def swap_operator(operator: str, function: Callable[..., Any], *, nth: int | None = None) -> MakeBackend:
    """A backend that calls another function for an operator of Dynamo's graph; its backward follows."""
    return partial(Toolkit, dynamo=replace(operator, function, nth=nth))


def drop_operator(operator: str) -> MakeBackend:
    """A backend that leaves an operator out of Dynamo's graph; its backward follows."""
    return partial(Toolkit, dynamo=drop(operator))


def shift_constant(operator: str, error: float, *, nth: int = 0) -> MakeBackend:
    """A backend in which the number that an operator is called with is off by a relative error."""

    def shift_number(node: fx.Node) -> None:
        if not isinstance(node.args[1], (int, float)):
            raise UsageError(f"{node} is called with {node.args[1]!r}, not with a number")
        node.update_arg(1, node.args[1] * (1 + error))

    return partial(Toolkit, dynamo=edit(operator, shift_number, nth=nth))


def change_returned(function: Change) -> MakeBackend:
    """A backend whose Dynamo graph hands its first output through a function; the backward follows."""

    def insert_call(module: fx.GraphModule) -> Runner | None:
        node = next(n for n in module.graph.nodes if n.op == "output")
        outputs = list(node.args[0])
        with module.graph.inserting_before(node):
            outputs[0] = module.graph.call_function(function, (outputs[0],))
        node.args = (tuple(outputs),)
        return None

    return partial(Toolkit, dynamo=insert_call)


# In AOTAutograd's graphs: forward or backward is wrong, the other one stays right.


def change_output(change: Change) -> MakeBackend:
    """A backend that changes the first result of the forward graph each time it runs; the backward stays right.

    Of a module that writes to buffers the first result is such a buffer: of a batch norm in training its count.
    """
    return partial(Toolkit, forward=_change_first(change))


def change_results(change: Callable[[list[Any], tuple[Any, ...]], Sequence[Any]]) -> MakeBackend:
    """A backend that sees results and inputs of the forward graph each time it runs, and returns other results."""
    return partial(Toolkit, forward=results(change))


def change_in_runs(when: Callable[[int], bool], change: Change) -> MakeBackend:
    """A backend that changes the first result in those runs for which ``when(number of the run, from 1)`` holds."""

    def make() -> Toolkit:
        runs = 0

        def change_if_due(returned: list[Any], _: object) -> list[Any]:
            nonlocal runs
            runs += 1
            if when(runs):
                returned[0] = change(returned[0])
            return returned

        return Toolkit(forward=results(change_if_due))

    return make


def change_gradient(shape: Sequence[int], change: Change) -> MakeBackend:
    """A backend that changes the first gradient of that shape each time the backward runs."""

    def change_one(gradients: list[Any], _: object) -> list[Any]:
        for place, gradient in enumerate(gradients):
            if isinstance(gradient, Tensor) and list(gradient.shape) == list(shape):
                return [*gradients[:place], change(gradient), *gradients[place + 1:]]
        shapes = [tuple(gradient.shape) for gradient in gradients if gradient is not None]
        raise UsageError(f"the graph returns no gradient of shape {tuple(shape)}; found {shapes}")

    return partial(Toolkit, backward=results(change_one))


def swap_in_backward(operator: str, function: Callable[..., Any]) -> MakeBackend:
    """A backend that calls another function for an operator of the backward graph."""
    return partial(Toolkit, backward=replace(operator, function))


def drop_in_backward(operator: str) -> MakeBackend:
    """A backend that leaves an operator of the backward graph out."""
    return partial(Toolkit, backward=drop(operator))


# What is done to one tensor.


def scaled_by(factor: float) -> Change:
    """Multiply every element."""

    def scale(tensor: Tensor) -> Tensor:
        return tensor * factor

    return scale


def one_element(index: int, factor: float) -> Change:
    """Multiply one element, counted in reading order (from the end if negative); NaN replaces it."""

    def scale_element(tensor: Tensor) -> Tensor:
        place = index % tensor.numel()
        mask = (torch.arange(tensor.numel(), device=tensor.device) == place).view(tensor.shape)
        return torch.where(mask, tensor * factor, tensor)

    return scale_element


def rounded_to(dtype: torch.dtype) -> Change:
    """Round to a narrower dtype and return in the tensor's own."""

    def round_trip(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).to(tensor.dtype)

    return round_trip


def first_scaled(returned: list[Any], _: object) -> list[Any]:
    """The first result of a graph 1 % larger, the others as they are."""
    # One per cent: far above rounding in every dtype that is tried, and far below what an eye would see.
    return [returned[0] * 1.01, *returned[1:]]


def _change_first(change: Change) -> Pass:
    def change_first(returned: list[Any], _: object) -> list[Any]:
        returned[0] = change(returned[0])
        return returned

    return results(change_first)
