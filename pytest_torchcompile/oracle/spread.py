"""Spread: how a model is spread over ranks, and how one process computes what they compute together.

A wrapper says what is its own in a class derived from :class:`Spread`, and the oracle asks nothing else of it.

n data-parallel replicas run one model from one state, each on a batch of its own. The gradient of a parameter is the
mean of what the n losses give, whatever the loss is; an output, a buffer or the gradient of an input depends on the
replica's own batch alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Final

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle.recording import run_theirs
from pytest_torchcompile.state.tensor_forms import same_bits

__all__ = ["NOT_SPREAD", "OneProcess", "Spread", "average_gradients", "losses_of_others", "same_batches"]


class Spread:
    """How a model is spread over ranks, as one of them sees it. As this class says it: each rank has all of it."""

    alike = True
    """Does every rank run the same program?"""
    every_replica = False
    """Does this process run the batches of all replicas?"""

    def __init__(self, call: Callable[..., Any], model: torch.nn.Module) -> None:
        """Take ``call``, what is called in place of the ``model``, and the model, which has the state."""
        self.call, self.model = call, model

    def settle(self) -> None:
        """Undo what a forward without a backward leaves. Called before the model's state is put back."""

    def whole(self) -> AbstractContextManager[Any]:
        """Entered where parameters and gradients are read or written: inside of it they are those of one process.

        Needed only where they are neither whole nor of the class ``DTensor``. All ranks enter it together.
        """
        return nullcontext()

    def own_parameters(self) -> Iterable[torch.nn.Parameter]:
        """The parameters whose gradients this rank computes."""
        return self.model.parameters()

    @property
    def reads_together(self) -> bool:
        """Whether no rank can read parameters unless all do."""
        return type(self).whole is not Spread.whole

    @cached_property
    def names_elsewhere(self) -> frozenset[str]:
        """Names of the parameters that are another rank's."""
        mine = {id(parameter) for parameter in self.own_parameters()}
        return frozenset(name for name, parameter in self.model.named_parameters() if id(parameter) not in mine)


class OneProcess(Spread):
    """Not spread: one process has the whole model, and runs the batches of all replicas."""

    every_replica = True


NOT_SPREAD: Final = Spread(lambda: None, torch.nn.Module())
"""For what is run outside of a trial, in one process, on its own batch."""


def same_batches(one: Sequence[Batch], other: Sequence[Batch]) -> bool:
    """Whether two replicas have the same tensors in every call: the mean of their gradients is then each one's own."""
    mine, theirs = _detached_tensors(one), _detached_tensors(other)
    return len(mine) == len(theirs) and all(map(same_bits, mine, theirs))


def _detached_tensors(batches: Sequence[Batch]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for batch in batches:
        for tensor in batch.tensors():
            tensors.append(tensor.detach())
    return tensors


def losses_of_others(call: Callable[..., Any], module: torch.nn.Module, batch: Batch,
                     loss: Callable[[Any, Batch], torch.Tensor | None]) -> list[torch.Tensor]:
    """Run the batches of the other replicas and return those losses that have a gradient.

    The module's buffers and the random generators are afterwards as they were, and each batch meets them so.
    """
    losses = []
    for other in batch.other_replicas:
        with _lent_state(module):
            value = loss(run_theirs(call, *other.args, **other.kwargs), other)
        if value is not None and value.requires_grad:
            losses.append(value)
    return losses


def average_gradients(parameters: Iterable[torch.nn.Parameter], batch: Batch) -> None:
    """Turn the sum of the gradients of a batch's replicas into their mean; of one replica it is that already."""
    if not batch.other_replicas:
        return
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(len(batch.replicas))


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
