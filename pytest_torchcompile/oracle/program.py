"""Program: everything needed to run one recording again, from the same state, in another precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.oracle.noise import Wide
from pytest_torchcompile.oracle.operator_rounding import program_unit, wide_dtype
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.state.model_copy import copy_model
from pytest_torchcompile.state.snapshot import StateSnapshot
from pytest_torchcompile.state.tensor_forms import COMPRESSED
from pytest_torchcompile.state.value_leaves import attribute_tensors

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.transcript import Transcript

__all__ = ["Program", "WideCopies"]

WideCopies: TypeAlias = "dict[torch.dtype, torch.nn.Module]"
"""A model by the precision that it was widened to, one at a time. Programs of one model may have them in common."""


@dataclass(frozen=True, eq=False)
class Program:
    """A model in its initial state with what it is run on."""

    module: torch.nn.Module
    batch: Batch
    loss: Callable[[Any, Any], Any] | None
    train: bool
    seed: int
    tape: Tape | None
    wide_copies: WideCopies = field(default_factory=dict)
    """The module widened once; its copies share the parameters until a run writes to one."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes what is entered around each eager run."""

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
        return _all_tensors(self.module, self.batch)

    @property
    def unit(self) -> float:
        """The unit roundoff of the narrowest floating dtype among the tensors and what the tape has seen."""
        seen = None
        if self.tape is not None:
            seen = self.tape.unit
        return program_unit(self.tensors, seen)

    @property
    def held_tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers, inputs, and what the tape has kept."""
        tensors = self.tensors
        if self.tape is not None:
            tensors += [draw for _, draw in self.tape.draws]
            tensors += self.tape.decisions.held_tensors()
        for module in self.wide_copies.values():
            tensors += _state_tensors(module)
        return tensors

    def copied(self, kept: WideCopies | None = None) -> Program:
        """A copy whose module and batch nobody else holds; raises what ``copy.deepcopy`` raises.

        ``kept``: the wide copies of a module whose parameters nobody writes to, so that they need no copies.
        """
        memo = None
        if kept is not None:
            memo = _shared_parameters(self.module)
        return replace(self, module=copy_model(self.module, memo), batch=self.batch.clone(),
                       wide_copies={} if kept is None else kept)

    def run_in_place(self) -> Recording:
        """Run the module itself, and put its state back: for one that can't be copied."""
        before = StateSnapshot(self.module)
        try:
            with self.around():
                return self._record(self.module, self.batch, None)
        finally:
            before.restore()

    def run_eager(self, mode: AbstractContextManager[Any] | None = None) -> Recording:
        """Run a copy of the module. It shares the parameters where the tape shows that the program leaves them."""
        if not self._spares_parameters:
            with self.around():
                return self._record(copy_model(self.module), self.batch, mode)
        module = copy_model(self.module, _shared_parameters(self.module))
        with self.around():
            recording = self._record(module, self.batch, mode, sparing=True)
        module.zero_grad()
        return recording

    @property
    def _spares_parameters(self) -> bool:
        return self.tape is not None and self.tape.spares_parameters

    def run_wide(
        self,
        dtype: torch.dtype,
        mode: AbstractContextManager[Any] | None,
        disturb: Callable[[torch.Tensor], None] | None = None,
        rest: bool = True,
        own_parameters: bool = False,
    ) -> Recording:
        """Run a copy widened to ``dtype``; ``disturb`` is given each of its floating tensors first. ``rest``: as for
        ``record``. ``own_parameters``: the copy has new ones, in the same memory: autograd keeps for each by which
        stream of a GPU its gradient arrives, and a run that is recorded as a CUDA graph has a stream of its own."""
        if dtype not in self.wide_copies:
            self.wide_copies.clear()
            self.wide_copies[dtype] = _widened_copy(self.module, dtype)
        base, batch = self.wide_copies[dtype], self.batch.to(dtype=dtype)
        versions = {id(parameter): parameter._version for parameter in base.parameters()}
        # Copies share the parameters, which saves their memory, unless these are disturbed.
        memo = _shared_parameters(base) if disturb is None else None
        if memo is not None and own_parameters:
            memo = {key: _in_the_same_memory(parameter) for key, parameter in memo.items()}
        module = copy_model(base, memo)
        if disturb is not None:
            _disturb_all(disturb, module, batch)
        with _written_out(dtype):
            recording = self._record(module, batch, mode, sparing=True, rest=rest)
        module.zero_grad()
        # The run has written to a shared parameter, or may have: the next one needs a new base.
        written = any(parameter._version != versions[id(parameter)] for parameter in base.parameters())
        if written or (self.tape is not None and not self.tape.spares_parameters):
            self.wide_copies.clear()
        return recording

    def run_again(self, transcript: Transcript, mode: Wide, rest: bool) -> dict[str, Any]:
        """Run what :meth:`run_wide` ran, by its transcript. Returns the values by name; raises what operators raise."""
        with warnings.catch_warnings(), eager_on_purpose(), _written_out(mode.wide):
            warnings.simplefilter("ignore")
            return transcript.run(mode, rest)

    def run_disturbed(self, disturb: Callable[[torch.Tensor], None], rest: bool = True) -> Recording:
        """Run a copy in the model's own precision; the rest as for :meth:`run_wide`."""
        module, batch = copy_model(self.module), self.batch.clone()
        _disturb_all(disturb, module, batch)
        with self.around():
            return self._record(module, batch, None, sparing=True, rest=rest)

    def _record(
        self, module: torch.nn.Module, batch: Batch, mode: AbstractContextManager[Any] | None, sparing: bool = False,
        rest: bool = True,
    ) -> Recording:
        """``sparing``: as for ``record``, of a module that nobody else has. ``rest``: as for ``record``."""
        unwritten = sparing and self._spares_parameters
        named = module
        if isinstance(module, _Called):
            named = module.module
        with warnings.catch_warnings(), eager_on_purpose():
            warnings.simplefilter("ignore")  # the eager run has said them already
            return record(module, named, batch, loss=self.loss, train=self.train, seed=self.seed, mode=mode,
                          rest=rest, sparing=sparing, unwritten=unwritten)


def _state_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _all_tensors(module: torch.nn.Module, batch: Batch) -> list[torch.Tensor]:
    tensors = _state_tensors(module)
    for replica in batch.replicas:
        tensors += replica.tensors()
    return tensors


def _disturb_all(disturb: Callable[[torch.Tensor], None], module: torch.nn.Module, batch: Batch) -> None:
    """In this order: it decides which noise a tensor gets."""
    tensors = _all_tensors(module, batch)
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


def _shared_parameters(module: torch.nn.Module) -> dict[int, Any]:
    """A memo for ``copy_model`` with which the copy has the same parameters."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        # One that is lazy becomes another kind of tensor in the first run.
        if not is_lazy(parameter):
            memo[id(parameter)] = parameter
    return memo


def _in_the_same_memory(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """A new parameter; one of another class stays itself."""
    if type(parameter) is not torch.nn.Parameter:
        return parameter
    return torch.nn.Parameter(parameter.detach(), parameter.requires_grad)


def _widened_copy(module: torch.nn.Module, wide: torch.dtype) -> torch.nn.Module:
    """A copy with all tensors widened; complex ones stay complex, unlike with ``Module.to``."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        dtype = wide_dtype(parameter.dtype, wide)
        # Others are copied first: they know best how.
        if type(parameter) is torch.nn.Parameter and parameter.dtype != dtype:
            memo[id(parameter)] = torch.nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
    for _, tensor in attribute_tensors(module):
        # Its ``data`` take no other dtype than what it stores.
        if tensor.layout in COMPRESSED:
            wider = tensor.detach().to(wide_dtype(tensor.dtype, wide))
            memo[id(tensor)] = wider.requires_grad_(tensor.requires_grad)
    module = copy_model(module, memo)
    for parameter in module.parameters():
        dtype = wide_dtype(parameter.dtype, wide)
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
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
