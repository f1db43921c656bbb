"""What a trial is made of: calls, sides that run them, and what is kept of each call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle.held import Held
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.variation import varied, vary
from pytest_torchcompile.state.snapshot import StateSnapshot

__all__ = ["Call", "Loss", "Make", "Passed", "Side", "memory_behind", "passes_over"]

Loss = Callable[[Any, Any], Any]
"""``loss(output, batch)``: a tensor of one element."""


@dataclass(frozen=True)
class Call:
    """One call of the model."""

    index: int
    batch: Batch
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes that have names."""
    other: int | None = None
    """Seed of other values for the parameters; None: their own."""
    suffix: str = ""
    training: bool | None = None
    """Switches the model to training, with a backward pass, or to evaluation, without; None: as the trial says."""
    also: tuple[Batch, ...] = ()
    """The batches of the other replicas, which one process runs along (:mod:`~pytest_torchcompile.oracle.replicas`)."""

    @property
    def label(self) -> str:
        """``call 2 (B=2, S=64), again``."""
        sizes = ", ".join(f"{k}={v}" for k, v in self.sizes.items())
        mode = "" if self.training is None else " training" if self.training else " evaluating"
        return f"call {self.index + 1}" + (f" ({sizes})" if sizes else "") + mode + self.suffix

    def trains(self, otherwise: bool) -> bool:
        """Whether the call has a backward pass."""
        return otherwise if self.training is None else self.training

    def switch(self, module: torch.nn.Module) -> None:
        """Switch the model, if the call does."""
        if self.training is not None:
            module.train(self.training)


def passes_over(calls: Sequence[Call], seed: int | None) -> Iterator[list[Call]]:
    """The calls three times over. The first pass compiles; in the second, parameters and batches have other values, so
    that a result which was kept is no result; the third is the first again, as CUDA graphs replay only then.

    ``seed`` None: always the same values.
    """
    yield list(calls)
    if seed is None:
        yield [replace(call, suffix=", once more") for call in calls]
    else:
        yield [replace(call, batch=varied(call.batch, seed), also=tuple(varied(batch, seed) for batch in call.also),
                       other=seed, suffix=", with other values") for call in calls]
    yield [replace(call, suffix=", again") for call in calls]


def memory_behind(calls: Sequence[Call]) -> int:
    """Bytes of memory of the device that the calls are on."""
    for call in calls:
        for tensor in call.batch.tensors():
            if tensor.is_cuda:
                return int(torch.cuda.get_device_properties(tensor.device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Side:
    """A model that runs calls, eagerly or compiled, each from the state in which it was given."""

    def __init__(self, call: Callable[..., Any], module: torch.nn.Module, *, alone: bool = False,
                 settle: Callable[[torch.nn.Module], None] | None = None,
                 whole: Callable[[Callable[..., Any]], AbstractContextManager[Any]] | None = None,
                 owned: Callable[[Callable[..., Any]], Iterable[torch.nn.Parameter]] | None = None) -> None:
        """Take what is run.

        Args:
            call: The module itself or whatever runs it.
            module: Has the state.
            alone: It is one process, which runs the batches of all replicas.
            settle: Called with the module before its state is put back.
            whole: As for ``record``; given the call.
            owned: Given the call, the parameters whose gradients it computes; None: all.
        """
        self.call, self.module, self.alone = call, module, alone
        self._settle = settle
        mine = None if owned is None else {id(parameter) for parameter in owned(call)}
        self.others = frozenset(() if mine is None else (n for n, p in module.named_parameters() if id(p) not in mine))
        """Names of the parameters that are another rank's."""
        self.whole: Callable[[], AbstractContextManager[Any]] = nullcontext if whole is None else partial(whole, call)
        self._start, self._held = StateSnapshot(module), Held()

    def restore(self) -> None:
        """Go back to the first state."""
        if self._settle is not None:
            self._settle(self.module)
        self._start.restore()

    def run(self, call: Call, loss: Loss | None, train: bool, seed: int,
            mode: AbstractContextManager[Any] | None = None) -> tuple[Recording, dict[str, str]]:
        """Run a call, and say too what became of the outputs of the call before (:class:`Held`)."""
        self.restore()
        if call.other is not None:
            with self.whole():
                vary(self.module, call.other)
        call.switch(self.module)
        found = record(self._held.holding(self.call), self.module, call.batch, loss=loss, train=call.trains(train),
                       seed=seed + call.index, mode=mode, also=call.also if self.alone else (),
                       whole=self.whole)
        return found, self._held.after(found)


Make = Callable[["dict[str, Any] | None"], Side]
"""``make(settings)``: the model in its initial state, compiled with ``torch.compile(**settings)``; None: eager."""


@dataclass(frozen=True)
class Passed:
    """What is kept of one call that both sides have made, next to its leaves."""

    call: Call
    raised: bool
    """Did eager, and compiled too, raise?"""
    graphs: int
    """Compiled graphs that ran in it, backward included."""
    zero: bool
    """Are all outputs zero, NaN or infinite, compiled?"""
    eager_zero: bool
    gradients: int
    """Eager gradients that are not."""
