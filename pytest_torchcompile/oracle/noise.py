"""Monte-Carlo arithmetic: a program in float64 whose operators round as in a narrower dtype. And its dice: random
relative errors, cheap enough to be thrown at every operator.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchcompile.oracle.exact_calls import picks_one
from pytest_torchcompile.oracle.operator_rounding import (
    APPROXIMATED,
    PRODUCTS,
    Operator,
    count_terms,
    operator_facts,
    sum_roundings,
    unit_of,
    wide_dtype,
    wide_version,
)
from pytest_torchcompile.oracle.tape import Replay, Rounding, Tape, key_of

__all__ = ["Dice", "Wide"]

_FLOAT16_UNIT = 2.0**-11
# Numbers in a pool: on a CPU as many as its cache holds.
_POOLS = {"cpu": 1 << 17}
_POOL = 1 << 20
# Between the seeds of two sequences.
_APART = 7919
# Pools of factors that are kept, those of the units used last.
_KEPT = 16
# Tensors with no more elements take their factors from a short pool. It costs little, so that many units can have one.
_SMALL = 1 << 12
_SHORT_POOL = 1 << 16
_SHORT_KEPT = 64


class Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs a program in ``wide``: casts and factories to narrower dtypes are widened, random draws replayed.

    With ``factor`` above zero each operator also rounds:

    * outbound: every result gets one relative error of up to the operator's unit;
    * inbound: operators that accumulate see their inputs perturbed by ``accumulator * sqrt(terms)``, which
      models another order of summation, including its cancellation;
    * tensors that an operator writes to (running statistics of batch norm too) are rounded after the write.

    The unit of an operator is the one that the tape has seen it round by, on tensors of these shapes; what the tape
    has not seen (attention is written out here) rounds by ``unit``. So do all, without ``by_operator``.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        wide: torch.dtype,
        tape: Tape | None,
        *,
        dice: Dice | None = None,
        factor: float = 0.0,
        unit: float = 0.0,
        accumulator: float = 0.0,
        inputs: dict[str, float] | None = None,
        by_operator: bool = True,
    ) -> None:
        """``inputs`` maps an operator's name to the unit to which its inputs are rounded first (TF32 products)."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.wide, self.factor, self.unit, self.accumulator = wide, factor, unit, accumulator
        self._own = unit_of(wide)
        self._wides = (wide, wide.to_complex())
        self._replay = Replay(tape)
        self._roundings = tape.roundings if tape is not None and by_operator else {}
        self._dice = dice or Dice(0)
        self._inputs = inputs or {}
        self._finest: float | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator in ``wide``, with noise."""
        kwargs = kwargs or {}
        # ``torch.cond`` and its like, torch 2.8 to 2.15.
        if isinstance(func, torch._ops.HigherOrderOperator):
            # Here, for most programs have none.
            from pytest_torchcompile.oracle.higher_order import run_higher_order

            return run_higher_order(self, func, self._widen_args(args), kwargs)
        asked = kwargs.get("dtype")
        if asked is not None and self._is_narrow(asked):
            kwargs = {**kwargs, "dtype": wide_dtype(asked, self.wide)}
        about = operator_facts(func)
        if about.random:
            drawn = self._replay.draw(func, args, self.wide)
            if drawn is not None:
                return drawn
        if not about.writes:
            args = self._widen_args(args)
        run = wide_version(about.name, func)
        if not self.factor or about.random or (about.exact and about.copies is None):
            return run(*args, **kwargs)
        if picks_one(about, args):
            return run(*args, **kwargs)
        rounding = self._rounding_of(about, args)
        if about.copies is not None:
            return self._round_copy(run(*args, **kwargs), rounding.unit, asked)
        return self._run_noisily(run, about, args, kwargs, rounding)

    def _run_noisily(
        self, func: Any, about: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], rounding: Rounding
    ) -> Any:
        hidden = []
        for position in about.running:
            if position < len(args) and self._can_round(args[position]) and not _is_expanded(args[position]):
                hidden.append((args[position], args[position].clone()))
        out = func(*self._disturb_inputs(about, args, rounding), **kwargs)
        for tensor, old in hidden:
            # Only what was written to. To ask whether anything was would wait for a GPU.
            rounded = tensor.clone()
            self._round_tensor(rounded, rounding.unit)
            tensor.copy_(rounded.where(tensor != old, tensor))
        for position, name in about.writes.items():
            # in out= variants the written argument is a keyword
            written = args[position] if position < len(args) else kwargs.get(name)
            self._round_all(written, rounding.unit)
        self._round_results(out, about, args, rounding.unit)
        if about.name in APPROXIMATED and self._can_round(out):
            self._add_approximation(out, args, about.name.endswith("_backward"))
        return out

    def _round_results(self, out: Any, about: Operator, args: tuple[Any, ...], unit: float) -> None:
        """Round what the operator has made anew, by ``unit`` or, of a long sum, by as many roundings as it has made."""
        if unit and about.accumulates:
            # A sum is kept in the accumulator's dtype, and rounded to that of the result once.
            of_accumulator = min(unit, self.accumulator)
            unit = max(unit, of_accumulator * sum_roundings(about.name, args))
        for result, fresh in zip(_as_sequence(out), about.fresh, strict=False):
            if fresh:
                self._round_all(result, unit)

    def _add_approximation(self, out: torch.Tensor, args: tuple[Any, ...], backward: bool) -> None:
        """An error in absolute terms, of the size of the function's arguments where those are larger than 1.

        The accumulator's unit, 6e-8 in float32: the usual error, of which the largest are several times as large.
        gelu(x) is x times a number that is known so well, and its backward that number times the gradient.
        """
        scale = torch.ones_like(out)
        self._dice.disturb(scale, self.factor * self.accumulator)
        scale.sub_(1)
        sizes = []
        for tensor in args:
            # Only what has an element for each of the output can scale it.
            if self._can_round(tensor) and tensor.shape == out.shape:
                sizes.append(tensor.detach().abs())
        if backward:
            scale.mul_(sizes.pop(0))
        for size in sizes:
            scale.mul_(size.clamp(min=1))
        out.add_(scale)

    def _rounding_of(self, about: Operator, args: tuple[Any, ...]) -> Rounding:
        known = self._roundings.get(key_of(about, args))
        if known is None:
            # a copy that eager did not make rounds nothing
            known = Rounding(self.unit if about.copies is None else 0.0)
        if self._finest is not None and known.unit > self._finest:
            known = Rounding(self._finest, known.inputs)
        return known

    def _round_copy(self, out: Any, unit: float, asked: torch.dtype | None) -> Any:
        """A cast to a narrower dtype is all that rounds in a copy."""
        if asked is not None:
            if self._is_narrow(asked):
                unit = min(unit, unit_of(asked))
            else:
                unit = 0.0
        if unit:
            self._round_all(out, unit)
        return out

    @contextmanager
    def finely(self) -> Iterator[None]:
        """Round as the accumulator does: ``default_loss`` works in float32 whatever the model works in."""
        self._finest = self.accumulator
        try:
            yield
        finally:
            self._finest = None

    def _is_narrow(self, dtype: torch.dtype) -> bool:
        return (dtype.is_floating_point or dtype.is_complex) and unit_of(dtype) > self._own

    def _can_round(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype in self._wides and value.numel() > 0

    def _widen_args(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Tensors that the model keeps outside its parameters and buffers arrive in their narrow dtype."""
        for i, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and self._is_narrow(arg.dtype):
                args = (*args[:i], arg.to(wide_dtype(arg.dtype, self.wide)), *args[i + 1 :])
        return args

    def _disturb_inputs(self, about: Operator, args: tuple[Any, ...], rounding: Rounding) -> tuple[Any, ...]:
        unit = 0.0
        if about.accumulates:
            root = max(1.0, count_terms(about.name, args) ** 0.5)
            unit = max(min(self.accumulator, rounding.unit) * root, self._inputs.get(about.name, 0.0))
        if not unit and not rounding.inputs:
            return args
        spared = None
        if about.name in PRODUCTS and not rounding.inputs:
            # noise in one factor does for both, and a weight need not be copied
            spared = max(filter(self._can_round, args), key=torch.Tensor.numel, default=None)
            unit *= 2**0.5

        def disturb(value: Any, unit: float) -> Any:
            if value is spared or not unit or not self._can_round(value):
                return value
            return self._dice.disturbed_copy(value, self.factor * unit)

        disturbed = list(args)
        for position, arg in enumerate(args):
            if position in about.running or position in about.writes:
                continue
            unit_here = max(unit, rounding.inputs.get(position, 0.0))
            if isinstance(arg, (list, tuple)):
                disturbed[position] = pytree.tree_map(partial(disturb, unit=unit_here), arg)
            else:
                disturbed[position] = disturb(arg, unit_here)
        return tuple(disturbed)

    def _round_all(self, value: Any, unit: float) -> None:
        for tensor in _as_sequence(value):
            if self._can_round(tensor):
                self._round_tensor(tensor, unit)

    def _round_tensor(self, tensor: torch.Tensor, unit: float) -> None:
        if not unit or _is_exact_size(tensor, unit):
            return
        self._dice.disturb(tensor, self.factor * unit)
        if unit == _FLOAT16_UNIT:
            # float16 runs out of exponents: below 2**-14 the error is absolute
            self._dice.add_drift(tensor, self.factor * 2.0**-25, below=2.0**-14)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements have one place in memory: torch writes to no such tensor."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_exact_size(tensor: torch.Tensor, unit: float) -> bool:
    """Whether it is one whole number that rounding to ``unit`` keeps: nothing has rounded on the way to it.

    Models compute sizes so, as the ceiling of (length - kernel) / stride: with noise the ceiling is one more, and the
    model raises.
    """
    if tensor.numel() != 1 or tensor.is_complex():
        return False
    value = float(tensor)
    return value.is_integer() and abs(value) * unit <= 1


def _as_sequence(value: Any) -> Any:
    return value if isinstance(value, (tuple, list)) else (value,)


class _FactorPools:
    """Pools of factors ``1 - unit * xi``, made of a pool of numbers, for each unit."""

    def __init__(self, length: int | None, kept: int) -> None:
        """``length``: how many of the pool's numbers are taken, None: all. ``kept``: for how many units."""
        self._length, self._kept = length, kept
        self._made: OrderedDict[tuple[torch.device, torch.dtype, float], torch.Tensor] = OrderedDict()

    def made_of(self, pool: torch.Tensor, unit: float) -> torch.Tensor:
        """The one for a unit. There is one pool of numbers for each device and dtype."""
        key = (pool.device, pool.dtype, unit)
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        self._made[key] = torch.rsub(pool[: self._length], 1.0, alpha=unit)
        if len(self._made) > self._kept:
            self._made.popitem(last=False)
        return self._made[key]


class Dice:
    """Uniform numbers in (-1, 1): slices of one pool per device, at random offsets.

    Slices of two throws are shifted against each other, so that they are as good as independent; large
    tensors are served in stretches of half a pool, each from an offset of its own.
    """

    def __init__(self, seed: int) -> None:
        self._offsets = random.Random(seed)
        self._seed = seed
        self._pools: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        self._factors = _FactorPools(None, _KEPT)
        self._short_factors = _FactorPools(_SHORT_POOL, _SHORT_KEPT)

    def begin_sequence(self, number: int) -> None:
        """Begin the sequence of this number: it is the same one whenever it is begun."""
        self._offsets.seed(self._seed + _APART * number)

    def disturb(self, tensor: torch.Tensor, unit: float) -> None:
        """Multiply every element by a factor within ``unit`` of 1, in place; zeros and infinities stay."""
        flat = _flat_memory(tensor)
        if flat is None:
            disturbed = tensor.contiguous()
            self.disturb(disturbed, unit)
            tensor.copy_(disturbed)
            return
        for part in self._stretches(flat):
            part.mul_(self._next_factors(part, unit))

    def disturbed_copy(self, tensor: torch.Tensor, unit: float) -> torch.Tensor:
        """A disturbed copy, of the same strides where the tensor fills its memory."""
        flat = _flat_memory(tensor)
        if flat is None:
            copy = tensor.clone()
            self.disturb(copy, unit)
            return copy
        # One kernel a stretch: to copy first would be another, and takes a GPU as long.
        copy = torch.empty_like(flat)
        for part, disturbed in zip(self._stretches(flat), self._stretches(copy), strict=True):
            torch.mul(part, self._next_factors(part, unit), out=disturbed)
        return copy.as_strided(tensor.shape, tensor.stride())

    def add_drift(self, tensor: torch.Tensor, size: float, below: float) -> None:
        """Add up to ``size`` to the elements that are smaller than ``below`` and not zero, in place."""
        small = (tensor.abs() < below) & (tensor != 0)
        # To ask would be to wait for a GPU.
        if tensor.device.type == "cpu" and not bool(small.any()):
            return
        noise = torch.ones_like(tensor)
        self.disturb(noise, size)
        tensor.add_(noise.sub_(1).mul_(small))

    def _stretches(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        half = _POOLS.get(flat.device.type, _POOL) // 2
        if flat.numel() <= half:
            yield flat
        else:
            yield from torch.split(flat, half)

    def _next_factors(self, like: torch.Tensor, unit: float) -> torch.Tensor:
        """Factors ``1 - unit * xi``, real or complex: infinity plus a part of infinity can be NaN."""
        count = like.numel()
        pools = self._short_factors if count <= _SMALL else self._factors
        factors = pools.made_of(self._pool(like.device, like.dtype), unit)
        return factors.narrow(0, self._offsets.randrange(factors.numel() - count), count)

    def _pool(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if (device, dtype) not in self._pools:
            self._pools[device, dtype] = self._new_pool(device, dtype)
        return self._pools[device, dtype]

    def _new_pool(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Uniform numbers in (-1, 1); of complex ones both parts."""
        generator = torch.Generator(device=device).manual_seed(self._seed)
        real_dtype = dtype.to_real() if dtype.is_complex else dtype
        real = torch.empty(_POOLS.get(device.type, _POOL) + 1, 2, dtype=real_dtype, device=device)
        real.uniform_(-1, 1, generator=generator)
        if dtype.is_complex:
            return torch.view_as_complex(real)
        return real[:, 0].clone()


def _flat_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory of a tensor that fills it without gaps, as one axis; ``None`` for others."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    straight = tensor.permute(order)
    if not straight.is_contiguous():
        return None
    return straight.view(-1)
