"""Monte-Carlo arithmetic: a program in float64 whose operators round as in a narrower dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchcompile.oracle.dice import Dice
from pytest_torchcompile.oracle.operators import (
    APPROXIMATED,
    PRODUCTS,
    Operator,
    count_terms,
    operator_facts,
    wide_version,
)
from pytest_torchcompile.oracle.tape import Replay, Rounding, Tape, key_of
from pytest_torchcompile.oracle.units import unit_of, wide_dtype

__all__ = ["Wide"]

_FLOAT16_UNIT = 2.0**-11


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
        rounding = self._rounding_of(about, args)
        if about.copies is not None:
            return self._round_copy(run(*args, **kwargs), rounding.unit, asked)
        return self._run_noisily(run, about, args, kwargs, rounding)

    def _run_noisily(
        self, func: Any, about: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], rounding: Rounding
    ) -> Any:
        hidden = []
        for position in about.running:
            if position < len(args) and self._can_round(args[position]):
                hidden.append((args[position], args[position].clone()))
        out = func(*self._disturb_inputs(about, args, rounding), **kwargs)
        for tensor, old in hidden:
            if not torch.equal(tensor, old):
                self._round_tensor(tensor, rounding.unit)
        for position, name in about.writes.items():
            # in out= variants the written argument is a keyword
            written = args[position] if position < len(args) else kwargs.get(name)
            self._round_all(written, rounding.unit)
        for result, fresh in zip(_as_sequence(out), about.fresh, strict=False):
            if fresh:
                self._round_all(result, rounding.unit)
        if about.name in APPROXIMATED and self._can_round(out):
            self._add_approximation(out, args, about.name.endswith("_backward"))
        return out

    def _add_approximation(self, out: torch.Tensor, args: tuple[Any, ...], backward: bool) -> None:
        """An error in absolute terms, of the size of the function's arguments where those are larger than 1.

        The accumulator's unit, 6e-8 in float32: the usual error, of which the largest are several times as large.
        gelu(x) is x times a number that is known so well, and its backward that number times the gradient.
        """
        scale = torch.ones_like(out)
        self._dice.disturb(scale, self.factor * self.accumulator)
        scale.sub_(1)
        sizes = [tensor.detach().abs() for tensor in args if self._can_round(tensor) and tensor.shape == out.shape]
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
        if not unit:
            return
        self._dice.disturb(tensor, self.factor * unit)
        if unit == _FLOAT16_UNIT:
            # float16 runs out of exponents: below 2**-14 the error is absolute
            self._dice.add_drift(tensor, self.factor * 2.0**-25, below=2.0**-14)


def _as_sequence(value: Any) -> Any:
    return value if isinstance(value, (tuple, list)) else (value,)
