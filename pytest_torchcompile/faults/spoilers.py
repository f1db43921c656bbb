"""Spoilers: the ways to make a tensor, a graph or a backend wrong, from which the records are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pytest_torchcompile.backends.toolkit import Pass, Runner, Toolkit, edit, replace, results
from pytest_torchcompile.errors import UsageError

__all__ = [
    "after",
    "backward",
    "constant",
    "element",
    "gradient",
    "output",
    "rounded",
    "sometimes",
    "traced",
]

Change = Callable[[Tensor], Any]


def traced(operator: str, function: Callable[..., Any], *, nth: int | None = None) -> Callable[[], Toolkit]:
    """A backend that calls another function for an operator of Dynamo's graph; its backward follows."""
    return lambda: Toolkit(dynamo=replace(operator, function, nth=nth))


def output(change: Change, which: int = 0) -> Callable[[], Toolkit]:
    """A backend that changes one result of the forward graph each time it runs; the backward stays right."""
    return lambda: Toolkit(forward=_one(which, change))


def gradient(shape: Sequence[int], change: Change) -> Callable[[], Toolkit]:
    """A backend that changes the gradient of that shape each time the backward runs."""

    def changed(found: list[Any], _: object) -> list[Any]:
        places = [i for i, g in enumerate(found) if isinstance(g, Tensor) and list(g.shape) == list(shape)]
        if not places:
            shapes = [tuple(g.shape) for g in found if g is not None]
            raise UsageError(f"the graph returns no gradient of shape {tuple(shape)}; found {shapes}")
        return [change(g) if i == places[0] else g for i, g in enumerate(found)]

    return lambda: Toolkit(backward=results(changed))


def backward(operator: str, function: Callable[..., Any], *, nth: int | None = None) -> Callable[[], Toolkit]:
    """A backend that calls another function for an operator of the backward graph."""
    return lambda: Toolkit(backward=replace(operator, function, nth=nth))


def constant(operator: str, error: float, *, nth: int = 0) -> Callable[[], Toolkit]:
    """A backend in which the number that an operator is called with is off by a relative error."""

    def off(node: fx.Node) -> None:
        if not isinstance(node.args[1], (int, float)):
            raise UsageError(f"{node} is called with {node.args[1]!r}, not with a number")
        node.update_arg(1, node.args[1] * (1 + error))

    return lambda: Toolkit(dynamo=edit(operator, off, nth=nth))


def after(change: Callable[[list[Any], tuple[Any, ...]], Sequence[Any]]) -> Callable[[], Toolkit]:
    """A backend that sees results and inputs of the forward graph each time it runs, and returns other results."""
    return lambda: Toolkit(forward=results(change))


def sometimes(when: Callable[[int, tuple[Any, ...]], bool], change: Change, which: int = 0) -> Callable[[], Toolkit]:
    """A backend that changes one result in those runs for which ``when(number of the run from 1, inputs)`` holds."""

    def make() -> Toolkit:
        runs = 0

        def changed(found: list[Any], inputs: tuple[Any, ...]) -> list[Any]:
            nonlocal runs
            runs += 1
            if when(runs, inputs):
                found[which] = change(found[which])
            return found

        return Toolkit(forward=results(changed))

    return make


def element(index: int, factor: float) -> Change:
    """Multiply one element, counted in reading order (from the end if negative); NaN replaces it."""

    def change(tensor: Tensor) -> Tensor:
        place = index % tensor.numel()
        mask = (torch.arange(tensor.numel(), device=tensor.device) == place).view(tensor.shape)
        return torch.where(mask, tensor * factor, tensor)

    return change


def rounded(dtype: torch.dtype) -> Change:
    """Round to a narrower dtype and return in the tensor's own."""
    return lambda tensor: tensor.to(dtype).to(tensor.dtype)


def _one(which: int, change: Change) -> Pass:
    def changed(found: list[Any], _: object) -> list[Any]:
        found[which] = change(found[which])
        return found

    return results(changed)


def returned(function: Change, which: int = 0) -> Callable[[], Toolkit]:
    """A backend whose Dynamo graph hands one of its outputs through a function; the backward follows."""

    def run(module: fx.GraphModule) -> Runner | None:
        node = next(n for n in module.graph.nodes if n.op == "output")
        outputs = list(node.args[0])
        with module.graph.inserting_before(node):
            outputs[which] = module.graph.call_function(function, (outputs[which],))
        node.args = (tuple(outputs),)
        return None

    return lambda: Toolkit(dynamo=run)
