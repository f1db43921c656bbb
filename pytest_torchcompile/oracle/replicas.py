"""Replicas: what data-parallel ranks compute together, computed by one process.

n replicas run one model from one state, each on a batch of its own. The gradient of a parameter is the mean of what
the n losses give, whatever the loss is; an output, a buffer or the gradient of an input depends on the replica's own
batch alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle.ownership import run_theirs
from pytest_torchcompile.state.tensor_values import same_bits

__all__ = ["average_gradients", "losses_of_others", "same_batches"]


def same_batches(one: Sequence[Batch], other: Sequence[Batch]) -> bool:
    """Whether two replicas have the same tensors in every call: the mean of their gradients is then each one's own."""
    mine = [tensor.detach() for batch in one for tensor in batch.tensors()]
    theirs = [tensor.detach() for batch in other for tensor in batch.tensors()]
    return len(mine) == len(theirs) and all(map(same_bits, mine, theirs))


def losses_of_others(call: Callable[..., Any], module: torch.nn.Module, batches: Sequence[Batch],
                     loss: Callable[[Any, Batch], torch.Tensor | None]) -> list[torch.Tensor]:
    """Run the batches of the other replicas and return those losses that have a gradient.

    The module's buffers and the random generators are afterwards as they were, and each batch meets them so.
    """
    losses = []
    for batch in batches:
        with _lent_state(module):
            value = loss(run_theirs(call, *batch.args, **batch.kwargs), batch)
        if value is not None and value.requires_grad:
            losses.append(value)
    return losses


def average_gradients(parameters: Iterable[torch.nn.Parameter], replicas: int) -> None:
    """Turn the sum of the replicas' gradients into their mean."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(replicas)


@contextmanager
def _lent_state(module: torch.nn.Module) -> Iterator[None]:
    """Let a call have copies of the buffers, and draw what the next call will draw again."""
    originals = [(part, dict(part._buffers)) for part in module.modules()]
    devices = []
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices.append(torch.cuda.current_device())
    python = random.getstate()
    with torch.no_grad():
        for part, buffers in originals:
            for name, buffer in buffers.items():
                if buffer is not None:
                    part._buffers[name] = buffer.clone()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        for part, buffers in originals:
            part._buffers.clear()
            part._buffers.update(buffers)
