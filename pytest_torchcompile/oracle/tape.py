"""Tape: what the eager run shows of a program: what random operators drew, and which operators round how."""

from __future__ import annotations

import copy
import hashlib
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchcompile.oracle.counted_decisions import CountedDecisions
from pytest_torchcompile.oracle.exact_calls import adds_whole_numbers, has_fractions
from pytest_torchcompile.oracle.gpu_waits import is_recordable
from pytest_torchcompile.oracle.operator_rounding import Operator, operator_facts, unit_of
from pytest_torchcompile.oracle.recording import run_theirs
from pytest_torchcompile.state.tensor_forms import is_plain

__all__ = ["Key", "Replay", "Rounding", "Tape", "as_sequence", "key_of", "written_tensors"]

Key: TypeAlias = "tuple[str, tuple[Any, ...]]"
"""An operator with the shapes of the tensors and the plain numbers that it is given."""
# Attribute of a tensor that the eager run has cast to a narrower dtype: the unit roundoff of that.
_NARROWED = "_torchcompile_narrowed"
_DROPOUT = "aten::native_dropout"
_FUSED_ATTENTION = "aten::_scaled_dot_product_efficient_attention"
# Position of the share of weights that it drops.
_SHARE = 5
# Elements of a mask of attention that is kept.
_LARGEST_MASK = 1 << 27


@dataclass
class Rounding:
    """How an operator on tensors of certain shapes rounds in the eager run; the coarsest of all its calls."""

    unit: float = 0.0
    """Unit roundoff of its result."""
    inputs: dict[int, float] = field(default_factory=dict)
    """Positions of arguments that were cast to a narrower dtype before, to the unit of that."""


def key_of(about: Operator, args: Sequence[Any]) -> Key:
    """What tells the same step of two runs in different precisions from other steps."""
    return about.name, tuple(_outline_of(argument) for argument in args)


def _outline_of(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        # a strided nested tensor has no shape, and says so by an error
        return torch.Size() if argument.is_nested else argument.shape
    if isinstance(argument, (list, tuple)):
        return tuple(_outline_of(each) for each in argument)
    if isinstance(argument, (bool, int, float, str)):
        return argument
    return None


def as_sequence(value: Any) -> Any:
    """What an operator is given or returns in one place, as a sequence: most often it is one tensor."""
    return value if isinstance(value, (tuple, list)) else (value,)


def written_tensors(about: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call declares to write to."""
    for position, name in about.writes.items():
        # In out= variants the written argument is a keyword.
        written = args[position] if position < len(args) else kwargs.get(name)
        for tensor in as_sequence(written):
            if isinstance(tensor, torch.Tensor):
                yield tensor


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the eager run: ``record(model, model, batch, mode=tape)``.

    ``rand_like`` and ``bernoulli(tensor)`` consume the generator differently in float64, so that equal seeds
    don't draw equal numbers across dtypes; replaying does. In float64 nobody can see any more which parts of a program
    were in bfloat16 (an autocast, a norm in float32); the tape notes it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[tuple[str, torch.Tensor]] = []
        self.roundings: dict[Key, Rounding] = {}
        # A hash of all operators in their order, each with the shapes and plain numbers that it was given.
        self.operators = hashlib.sha256()
        self.decisions = CountedDecisions()
        self.is_recordable = True
        """Whether all of the run can be a CUDA graph, as far as is known."""
        # Whether the run is known to have written to none of the parameters.
        self.spares_parameters = False
        # The parameters, with the addresses of their memory before the run; and of what operators wrote to.
        self._memory: list[tuple[torch.Tensor, int]] = []
        self._written: set[int] = set()

    @property
    def unit(self) -> float | None:
        """The largest unit roundoff of any operator that rounds; ``None`` if none does."""
        units = [rounding.unit for rounding in self.roundings.values()]
        return max(units, default=0.0) or None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator; keep what it drew and how it rounds."""
        # ``torch.cond`` and its like, torch 2.8 to 2.15.
        if isinstance(func, torch._ops.HigherOrderOperator):
            # Here, for most programs have none.
            from pytest_torchcompile.oracle.higher_order import run_higher_order

            self.is_recordable = False
            return run_higher_order(self, func, args, kwargs or {})
        kwargs = kwargs or {}
        out = run_theirs(func, *args, **kwargs)
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        about = operator_facts(func)
        key = key_of(about, args)
        self.operators.update(repr(key).encode("utf-8", "surrogatepass"))
        written = list(written_tensors(about, args, kwargs))
        for tensor in written:
            if is_plain(tensor):
                self._written.add(tensor.untyped_storage().data_ptr())
        self.decisions.note(about, key, (args, kwargs), out, written)
        # What decides or counts keeps this one: its arguments were rounded where they were made, and are not again.
        rounding = self.roundings.setdefault(key, Rounding())
        if has_fractions(first):
            self._note_rounding(rounding, about, args, kwargs, first)
        self.is_recordable = self.is_recordable and is_recordable(func, args, kwargs, out)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            name, drawn = _drawn_by(func._schema.name, args, kwargs, out)
            if isinstance(drawn, torch.Tensor):
                self.draws.append((name, drawn.detach().clone()))
        return out

    def deciding(self, decisions: CountedDecisions) -> Tape:
        """The same, with other decisions on counted numbers."""
        other = copy.copy(self)
        other.decisions = decisions
        return other

    def begin_run(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take the parameters that the run may write to."""
        self._memory, self._written = [], set()
        self.spares_parameters = all(is_plain(parameter) for parameter in parameters)
        if self.spares_parameters:
            self._memory = [(parameter, parameter.untyped_storage().data_ptr()) for parameter in parameters]

    def end_run(self) -> None:
        """Say whether the run has written to the memory of a parameter, or given it another."""
        for parameter, memory in self._memory:
            if memory in self._written or parameter.untyped_storage().data_ptr() != memory:
                self.spares_parameters = False
        self._memory, self._written = [], set()
        self.decisions.end()

    def _note_rounding(self, rounding: Rounding, about: Operator, args: tuple[Any, ...], kwargs: dict[str, Any],
                       result: torch.Tensor) -> None:
        unit = unit_of(result.dtype)
        narrowed = {}
        for position, argument in enumerate(args):
            if narrow := getattr(argument, _NARROWED, 0.0):
                narrowed[position] = narrow
        source: Any = None
        if about.copies is not None and about.copies < len(args):
            source = args[about.copies]
        if has_fractions(source):
            if unit > unit_of(source.dtype):
                narrowed = {0: unit}
            else:
                unit = 0.0  # nothing is rounded
        # Not asked where the coarsest call has rounded so already: to look at numbers is to wait for a GPU.
        elif about.exact or (unit > rounding.unit and adds_whole_numbers(about, args, kwargs, result)):
            unit = 0.0
        if about.exact and narrowed:
            setattr(result, _NARROWED, max(narrowed.values()))
        rounding.unit = max(rounding.unit, unit)
        if not about.exact:
            for position, narrow in narrowed.items():
                rounding.inputs[position] = max(rounding.inputs.get(position, 0.0), narrow)


def _drawn_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> tuple[str, Any]:
    """What a random operator has drawn, and the operator that is to be handed it; no tensor where nobody knows."""
    if name == _DROPOUT:
        # It returns the mask beside the result.
        return name, out[1]
    if name == _FUSED_ATTENTION:
        # In a wide run attention is written out, and drops its weights by this operator.
        return _DROPOUT, _attention_mask(args, kwargs, out)
    return name, out


def _attention_mask(args: Sequence[Any], kwargs: Mapping[str, Any], out: Sequence[Any]) -> torch.Tensor | None:
    """Which weights a fused attention has kept: (batch, heads, queries, keys); None without dropout, or for too many.

    The kernel draws in its own order, from a seed and an offset that it returns. Torch has the operator that fills a
    tensor with the same numbers, for its own tests (torch 2.8 to 2.15, native/transformers/cuda/attention.cu).
    """
    query, key = args[0], args[1]
    share = float(args[_SHARE] if len(args) > _SHARE else kwargs.get("dropout_p", 0.0))
    shape = (*query.shape[:-1], key.shape[-2])
    fill = getattr(torch.ops.aten, "_fill_mem_eff_dropout_mask_", None)
    if not share or math.prod(shape) > _LARGEST_MASK or fill is None:
        return None
    uniform = torch.empty(shape, dtype=torch.float32, device=query.device)
    fill(uniform, share, int(out[2]), int(out[3]))
    return uniform > share


class Replay:
    """Hands the draws of a tape out again, operator by operator, in their order."""

    def __init__(self, tape: Tape | None) -> None:
        self._left: dict[str, deque[torch.Tensor]] = defaultdict(deque)
        if tape is None:
            return
        for name, drawn in tape.draws:
            self._left[name].append(drawn)

    def draw(self, func: Callable[..., Any], args: tuple[Any, ...], wide: torch.dtype) -> Any:
        """What the random operator ``func`` drew then, or ``None`` if the tape has nothing that fits."""
        schema = func._schema  # type: ignore[attr-defined]
        left = self._left.get(schema.name)
        if not left:
            return None
        like = None
        if args and isinstance(args[0], torch.Tensor):
            like = args[0]
        writes = bool(schema.arguments) and schema.arguments[0].alias_info is not None
        if like is not None and schema.name != "aten::multinomial" and like.shape != left[0].shape:
            return None
        drawn = left.popleft()
        if schema.name == _DROPOUT and like is not None:
            p = args[1]
            scale = 1.0 / (1.0 - p) if p < 1 else 0.0
            return like * drawn * scale, drawn.clone()
        if drawn.is_floating_point():
            drawn = drawn.to(wide)
        if writes and like is not None:
            return like.copy_(drawn)
        return drawn.clone()
