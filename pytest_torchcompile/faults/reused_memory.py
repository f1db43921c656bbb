"""Planted faults: memory that is used again too soon, and gradients that do not add up."""

from __future__ import annotations

import itertools
from collections import defaultdict
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from pytest_torchcompile.backends.toolkit import Toolkit, results
from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.fault_parts import Case

__all__ = ["REUSED_MEMORY"]


def _rotating(buffers: int) -> Toolkit:
    """Outputs of one size take turns in so many buffers, as those of CUDA graphs that were recorded by size do."""
    memory: dict[Any, list[Tensor]] = {}
    turns: dict[Any, Any] = defaultdict(lambda: itertools.cycle(range(buffers)))

    def reuse_memory(returned: list[Any], _: object) -> list[Any]:
        output = returned[0]
        if output.shape not in memory:
            memory[output.shape] = [torch.empty_like(output) for _ in range(buffers)]
        buffer = memory[output.shape][next(turns[output.shape])]
        return [buffer.copy_(output), *returned[1:]]

    return Toolkit(forward=results(reuse_memory))


def _gradients_replaced() -> Toolkit:
    """Gradients take the place of those that are there, instead of being added to them."""
    parameters: dict[int, Tensor] = {}

    def note_parameters(returned: list[Any], inputs: tuple[Any, ...]) -> list[Any]:
        for each in inputs:
            if isinstance(each, torch.nn.Parameter):
                parameters[id(each)] = each
        return returned

    def drop_gradients(gradients: list[Any], _: object) -> list[Any]:
        for parameter in parameters.values():
            parameter.grad = None
        return gradients

    return Toolkit(forward=results(note_parameters), backward=results(drop_gradients))


def _gradients_in_same_memory() -> Toolkit:
    """Each backward pass writes its gradients to the memory of those before, as a replayed CUDA graph does."""
    memory: dict[tuple[int, Any], Tensor] = {}

    def reuse_memory(gradients: list[Any], _: object) -> list[Any]:
        reused = []
        for place, gradient in enumerate(gradients):
            if isinstance(gradient, Tensor):
                buffer = memory.setdefault((place, gradient.shape), torch.empty_like(gradient))
                # A tensor of its own in memory of ours: autograd takes it for the gradient as it is.
                gradient = buffer.copy_(gradient).detach()
            reused.append(gradient)
        return reused

    return Toolkit(backward=results(reuse_memory))


REUSED_MEMORY: Final = (
    Case("output overwritten", "a later call writes into the memory of an earlier output", p.TWO_BATCHES, "alias",
         partial(_rotating, 1)),
    Case("one output buffer for each size", "the next call of that size writes into it", p.THREE_SIZES, "alias",
         partial(_rotating, 1)),
    Case("two output buffers that take turns", "every second call writes into the same one", p.PERCEPTRON, "alias",
         partial(_rotating, 2)),
    Case("three output buffers that take turns", "every third call writes into the same one", p.TWO_BATCHES, "alias",
         partial(_rotating, 3)),
    Case("gradients replaced", "a second backward pass forgets the first", p.TWO_BATCHES, "gradient",
         _gradients_replaced, "added to", steps=2),
    Case("gradients in the same memory", "a second backward pass overwrites what it should add to", p.TWO_BATCHES,
         "gradient", _gradients_in_same_memory, "added to", steps=2),
)
