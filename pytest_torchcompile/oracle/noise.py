"""Monte-Carlo arithmetic: a program in float64 whose operators round as in a narrower dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchcompile.oracle.dice import Dice
from pytest_torchcompile.oracle.operators import PRODUCTS, Operator, operator, terms
from pytest_torchcompile.oracle.tape import Replay, Tape
from pytest_torchcompile.oracle.units import unit_of, widened

__all__ = ["Wide"]

_FLOAT16_UNIT = 2.0**-11


class Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs a program in ``wide``: casts and factories to narrower dtypes are widened, random draws replayed.

    With ``unit`` each operator also rounds:

    * outbound: every result gets one relative error of up to ``unit``;
    * inbound: operators that accumulate see their inputs perturbed by ``accumulator * sqrt(terms)``, which
      models another order of summation, including its cancellation;
    * tensors that an operator writes to (running statistics of batch norm too) are rounded after the write.

    ``inputs`` maps an operator's name to the unit to which its inputs are rounded first (TF32 products).
    """

    def __init__(
        self,
        wide: torch.dtype,
        tape: Tape | None,
        *,
        dice: Dice | None = None,
        unit: float = 0.0,
        accumulator: float = 0.0,
        inputs: dict[str, float] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wide, self.unit, self.accumulator = wide, unit, min(unit, accumulator)
        self._own = unit_of(wide)
        self._wides = (wide, wide.to_complex())
        self._replay = Replay(tape)
        self._dice = dice or Dice(0)
        self._inputs = inputs or {}
        self._underflows = unit / _FLOAT16_UNIT * 2.0**-25 if 0.5 < unit / _FLOAT16_UNIT < 4 else 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator in ``wide``, with noise."""
        kwargs = kwargs or {}
        narrow = kwargs.get("dtype")
        if narrow is not None and self._narrow(narrow):
            kwargs = {**kwargs, "dtype": widened(narrow, self.wide)}
        about = operator(func)
        if about.random:
            drawn = self._replay.draw(func, args, self.wide)
            if drawn is not None:
                return drawn
        if not about.writes:
            args = self._widened(args)
        if not self.unit or about.exact or about.random:
            return func(*args, **kwargs)
        hidden = [(args[i], args[i].clone()) for i in about.running if i < len(args) and self._real(args[i])]
        out = func(*self._inbound(about, args), **kwargs)
        for tensor, old in hidden:
            if not torch.equal(tensor, old):
                self._round(tensor)
        for position, name in about.writes.items():
            # in out= variants the written argument is a keyword
            self._round_all(args[position] if position < len(args) else kwargs.get(name))
        for result, fresh in zip(_several(out), about.fresh, strict=False):
            if fresh:
                self._round_all(result)
        return out

    @contextmanager
    def finely(self) -> Iterator[None]:
        """Round as the accumulator does: ``default_loss`` works in float32 whatever the model works in."""
        before = self.unit
        self.unit = min(self.unit, self.accumulator)
        try:
            yield
        finally:
            self.unit = before

    def _narrow(self, dtype: torch.dtype) -> bool:
        return (dtype.is_floating_point or dtype.is_complex) and unit_of(dtype) > self._own

    def _real(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype in self._wides and value.numel() > 0

    def _widened(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Tensors that the model keeps outside its parameters and buffers arrive in their narrow dtype."""
        for i, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and self._narrow(arg.dtype):
                args = (*args[:i], arg.to(widened(arg.dtype, self.wide)), *args[i + 1 :])
        return args

    def _inbound(self, about: Operator, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not about.accumulates:
            return args
        root = max(1.0, terms(about.name, args) ** 0.5)
        unit = max(min(self.accumulator * root, self.unit * root), self._inputs.get(about.name, 0.0))
        spared = None
        if about.name in PRODUCTS:
            # noise in one factor does for both, and a weight need not be copied
            spared = max((a for a in args if self._real(a)), key=torch.Tensor.numel, default=None)
            unit *= 2**0.5

        def perturbed(value: Any) -> Any:
            if value is spared or not self._real(value):
                return value
            return self._dice.disturbed(value, unit)

        return tuple(
            arg
            if i in about.running
            else pytree.tree_map(perturbed, arg)
            if isinstance(arg, (list, tuple))
            else perturbed(arg)
            for i, arg in enumerate(args)
        )

    def _round_all(self, value: Any) -> None:
        for tensor in _several(value):
            if self._real(tensor):
                self._round(tensor)

    def _round(self, tensor: torch.Tensor) -> None:
        self._dice.disturb(tensor, self.unit)
        if self._underflows:
            # float16 runs out of exponents: below 2**-14 the error is absolute
            self._dice.drift(tensor, self._underflows, below=2.0**-14)


def _several(value: Any) -> Any:
    return value if isinstance(value, (tuple, list)) else (value,)
