"""Program: everything needed to run one recording again, from the same state, in another precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.oracle.units import program_unit, wide_dtype
from pytest_torchcompile.state.model_copy import copy_model
from pytest_torchcompile.state.paths import attribute_tensors
from pytest_torchcompile.state.snapshot import StateSnapshot

__all__ = ["Program"]


@dataclass(frozen=True, eq=False)
class Program:
    """A model in its initial state with what it is run on."""

    module: torch.nn.Module
    batch: Batch
    loss: Callable[[Any, Any], Any] | None
    train: bool
    seed: int
    tape: Tape | None
    also: tuple[Batch, ...] = ()
    """Batches of other replicas; as for ``record``."""
    _widest: dict[torch.dtype, torch.nn.Module] = field(default_factory=dict)
    """The module widened once; its copies share the parameters until a run writes to one."""

    @classmethod
    def of(cls, model: Any, batch: Batch, call: Callable[..., Any] | None = None, **rest: Any) -> Program:
        """A program of a module or a plain function; nothing is copied yet. ``call``: what runs the module instead."""
        if call is not None and call is not model:
            model = _Called(model, call)
        elif not isinstance(model, torch.nn.Module):
            model = _Function(model)
        return cls(model, batch, **rest)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers and inputs."""
        return _all_tensors(self.module, self.batch, *self.also)

    @property
    def unit(self) -> float:
        """The unit roundoff of the narrowest floating dtype among the tensors and what the tape has seen."""
        seen = None
        if self.tape is not None:
            seen = self.tape.unit
        return program_unit(self.tensors, seen)

    @property
    def nbytes(self) -> int:
        """Memory of parameters, buffers, inputs and recorded random draws."""
        tensors = self.tensors
        if self.tape is not None:
            tensors += [draw for _, draw in self.tape.draws]
        for module in self._widest.values():
            tensors += _all_tensors(module)
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    def copied(self) -> Program:
        """A copy whose module and batch nobody else holds; raises what ``copy.deepcopy`` raises."""
        module = copy_model(self.module)
        also = tuple(batch.clone() for batch in self.also)
        return replace(self, module=module, batch=self.batch.clone(), also=also, _widest={})

    def run_eager(self) -> Recording:
        """Run the module as it is, and put its state back."""
        before = StateSnapshot(self.module)
        try:
            return self._record(self.module, self.batch, self.also, None, sparing=False)
        finally:
            before.restore()

    def run_wide(
        self,
        dtype: torch.dtype,
        mode: AbstractContextManager[Any] | None,
        disturb: Callable[[torch.Tensor], None] | None = None,
    ) -> Recording:
        """Run a copy widened to ``dtype``; ``disturb`` is given each of its floating tensors first."""
        if dtype not in self._widest:
            self._widest.clear()
            self._widest[dtype] = _widen_module(copy_model(self.module), dtype)
        base, batch = self._widest[dtype], self.batch.to(dtype=dtype)
        also = [each.to(dtype=dtype) for each in self.also]
        versions = {id(parameter): parameter._version for parameter in base.parameters()}
        # Copies share the parameters, which saves their memory, unless these are disturbed.
        shared = None
        if disturb is None:
            shared = {id(parameter): parameter for parameter in base.parameters()}
        module = copy_model(base, shared)
        if disturb is not None:
            _disturb_all(disturb, module, batch, *also)
        with _written_out(dtype):
            recording = self._record(module, batch, also, mode, sparing=True)
        module.zero_grad()
        # The run has written to a shared parameter: the next one needs a new base.
        if any(parameter._version != versions[id(parameter)] for parameter in base.parameters()):
            self._widest.clear()
        return recording

    def run_disturbed(self, disturb: Callable[[torch.Tensor], None]) -> Recording:
        """Run a copy in the model's own precision; ``disturb`` is given each of its floating tensors first."""
        module, batch, also = copy_model(self.module), self.batch.clone(), [each.clone() for each in self.also]
        _disturb_all(disturb, module, batch, *also)
        return self._record(module, batch, also, None, sparing=True)

    def _record(
        self, module: torch.nn.Module, batch: Batch, also: Sequence[Batch], mode: AbstractContextManager[Any] | None,
        sparing: bool
    ) -> Recording:
        named = module
        if isinstance(module, _Called):
            named = module.module
        with warnings.catch_warnings(), eager_on_purpose():
            warnings.simplefilter("ignore")  # the eager run has said them already
            return record(module, named, batch, loss=self.loss, train=self.train, seed=self.seed, mode=mode,
                          sparing=sparing, also=also)


def _all_tensors(module: torch.nn.Module, *batches: Batch) -> list[torch.Tensor]:
    tensors = [*module.parameters(), *module.buffers()]
    for batch in batches:
        tensors += batch.tensors()
    return tensors


def _disturb_all(disturb: Callable[[torch.Tensor], None], module: torch.nn.Module, *batches: Batch) -> None:
    """In this order: it decides which noise a tensor gets."""
    tensors = _all_tensors(module, *batches)
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point() or tensor.is_complex():
                disturb(tensor)


class _Function(torch.nn.Module):
    """A model that is a plain function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


class _Called(torch.nn.Module):
    """A module with the callable that runs it: copied together, so that the copy runs the copy."""

    def __init__(self, module: torch.nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.__dict__["forward"] = call


def _widen_module(module: torch.nn.Module, wide: torch.dtype) -> torch.nn.Module:
    """Widen all tensors of a module in place; complex ones stay complex, unlike with ``Module.to``."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(wide_dtype(parameter.dtype, wide))
    # Buffers are replaced, not written to: two names of one buffer have to stay one.
    done: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                wider = done.setdefault(id(buffer), buffer.to(wide_dtype(buffer.dtype, wide)))
                part._buffers[name] = done[id(wider)] = wider
    for _, tensor in attribute_tensors(module):
        if tensor.dtype != wide_dtype(tensor.dtype, wide):
            tensor.data = tensor.data.to(wide_dtype(tensor.dtype, wide))
    return module


@contextmanager
def _written_out(wide: torch.dtype) -> Iterator[None]:
    """Wide by default; attention in single operators, so that its roundings are drawn."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = torch.get_default_dtype()
    torch.set_default_dtype(wide)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_default_dtype(before)
