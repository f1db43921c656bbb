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
            return cls(_Called(model, call), batch, **rest)
        return cls(model if isinstance(model, torch.nn.Module) else _Function(model), batch, **rest)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers and inputs."""
        batches = [tensor for batch in (self.batch, *self.also) for tensor in batch.tensors()]
        return [*self.module.parameters(), *self.module.buffers(), *batches]

    @property
    def unit(self) -> float:
        """The unit roundoff of the narrowest floating dtype among the tensors and what the tape has seen."""
        return program_unit(self.tensors, None if self.tape is None else self.tape.unit)

    @property
    def nbytes(self) -> int:
        """Memory of parameters, buffers, inputs and recorded random draws."""
        drawn = [] if self.tape is None else [t for _, t in self.tape.draws]
        wide = [t for module in self._widest.values() for t in (*module.parameters(), *module.buffers())]
        return sum(t.numel() * t.itemsize for t in (*self.tensors, *drawn, *wide))

    def copied(self) -> Program:
        """A copy whose module and batch nobody else holds; raises what ``copy.deepcopy`` raises."""
        module = copy_model(self.module)
        return replace(self, module=module, batch=self.batch.clone(), also=tuple(b.clone() for b in self.also),
                       _widest={})

    def eager(self) -> Recording:
        """Run the module as it is, and put its state back."""
        before = StateSnapshot(self.module)
        try:
            return self._record(self.module, self.batch, self.also, None, sparing=False)
        finally:
            before.restore()

    def wide(
        self,
        dtype: torch.dtype,
        mode: AbstractContextManager[Any] | None,
        disturb: Callable[[torch.Tensor], None] | None = None,
    ) -> Recording:
        """Run a copy widened to ``dtype``; ``disturb`` is given each of its floating tensors first."""
        if dtype not in self._widest:
            self._widest.clear()
            self._widest[dtype] = _widened(copy_model(self.module), dtype)
        base, batch, also = self._widest[dtype], self.batch.to(dtype=dtype), [b.to(dtype=dtype) for b in self.also]
        versions = {id(p): p._version for p in base.parameters()}
        module = copy_model(base, {id(p): p for p in base.parameters()} if disturb is None else None)
        if disturb is not None:
            with torch.no_grad():
                inputs = [tensor for each in (batch, *also) for tensor in each.tensors()]
                for tensor in (*module.parameters(), *module.buffers(), *inputs):
                    if tensor.is_floating_point() or tensor.is_complex():
                        disturb(tensor)
        with _written_out(dtype):
            seen = self._record(module, batch, also, mode, sparing=True)
        module.zero_grad()
        if any(p._version != versions[id(p)] for p in base.parameters()):
            self._widest.clear()
        return seen

    def disturbed(self, disturb: Callable[[torch.Tensor], None]) -> Recording:
        """Run a copy in the model's own precision; ``disturb`` is given each of its floating tensors first."""
        module, batch, also = copy_model(self.module), self.batch.clone(), [each.clone() for each in self.also]
        inputs = [tensor for each in (batch, *also) for tensor in each.tensors()]
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers(), *inputs):
                if tensor.is_floating_point() or tensor.is_complex():
                    disturb(tensor)
        return self._record(module, batch, also, None, sparing=True)

    def _record(
        self, module: torch.nn.Module, batch: Batch, also: Sequence[Batch], mode: AbstractContextManager[Any] | None,
        sparing: bool
    ) -> Recording:
        named = module.module if isinstance(module, _Called) else module
        with warnings.catch_warnings(), eager_on_purpose():
            warnings.simplefilter("ignore")  # the eager run has said them already
            return record(module, named, batch, loss=self.loss, train=self.train, seed=self.seed, mode=mode,
                          sparing=sparing, also=also)


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


def _widened(module: torch.nn.Module, wide: torch.dtype) -> torch.nn.Module:
    """Widen all tensors of a module in place; complex ones stay complex, unlike with ``Module.to``."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(wide_dtype(parameter.dtype, wide))
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
