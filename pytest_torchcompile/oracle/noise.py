"""Monte-Carlo arithmetic: a program in float64 whose operators round as in a narrower dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchcompile.oracle.counted_decisions import DecisionReplay
from pytest_torchcompile.oracle.dice import Dice
from pytest_torchcompile.oracle.exact_calls import picks_one
from pytest_torchcompile.oracle.operator_rounding import (
    APPROXIMATED,
    EMULATED,
    PRODUCTS,
    Operator,
    count_terms,
    operator_facts,
    sum_roundings,
    unit_of,
    wide_dtype,
)
from pytest_torchcompile.oracle.tape import Replay, Rounding, Tape, as_sequence, key_of, written_tensors
from pytest_torchcompile.state.tensor_forms import stored_numbers

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.draw_graph import DrawGraph
    from pytest_torchcompile.oracle.transcript import Transcript

__all__ = ["RoundedCall", "Wide"]

_FLOAT16_UNIT = 2.0**-11


@dataclass(slots=True)
class RoundedCall:
    """How a call of an operator runs wide, and where it rounds. Shapes and dtypes decide it, and no number."""

    func: Any
    about: Operator
    run: Any
    """What is called in place of the operator, most often itself."""
    narrow: tuple[int, ...] = ()
    """Positions of tensors that the model keeps outside its parameters and buffers: they arrive in a narrow dtype."""
    rounds: bool = False
    """Whether it rounds anything that is not told by ``copied``."""
    copied: float = 0.0
    """The unit by which the result of a copy is rounded."""
    inputs: tuple[tuple[int, float], ...] = ()
    """Positions of arguments that are disturbed, and by which unit."""
    written: float = 0.0
    """The unit by which is rounded what the operator writes to."""
    fresh: float = 0.0
    """The unit by which is rounded what it has made anew."""
    decided: torch.Tensor | None = None
    """What eager has made of it, which takes the place of its result."""

    @property
    def is_noisy(self) -> bool:
        """Whether noise moves floating numbers in it."""
        return self.rounds or bool(self.copied)


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
        decisions: DecisionReplay | None = None,
        listener: Transcript | DrawGraph | None = None,
    ) -> None:
        """Take what the noise is to be.

        Args:
            wide: The dtype that the program runs in.
            tape: Of the eager run.
            dice: Where the noise comes from.
            factor: How many times its usual noise the program has; 0: none.
            unit: The unit roundoff of an operator that the tape has not seen.
            accumulator: The unit of sums inside of an operator.
            inputs: An operator's name to the unit to which its inputs are rounded first (TF32 products).
            by_operator: Whether the tape's units are taken.
            decisions: Those that eager has taken on counted numbers; None: the run takes all of them itself.
            listener: Is told each call, so that the run can be made again by it.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.wide, self.factor, self.unit, self.accumulator = wide, factor, unit, accumulator
        self.listener = listener
        self._own = unit_of(wide)
        self._wides = (wide, wide.to_complex())
        self._replay = Replay(tape)
        self._decisions = decisions
        self._roundings = tape.roundings if tape is not None and by_operator else {}
        self._dice = dice or Dice(0)
        self._inputs = inputs or {}
        self._finest: float | None = None
        self._watching = ExitStack()

    def __enter__(self) -> Any:
        """Have the listener watch what is no operator, too."""
        if self.listener is not None:
            self._watching.enter_context(self.listener.watching())
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *about_error: Any) -> None:
        """End both."""
        super().__exit__(*about_error)  # type: ignore[no-untyped-call]
        self._watching.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator in ``wide``, with noise."""
        kwargs = kwargs or {}
        # ``torch.cond`` and its like, torch 2.8 to 2.15.
        if isinstance(func, torch._ops.HigherOrderOperator):
            # Here, for most programs have none.
            from pytest_torchcompile.oracle.higher_order import run_higher_order

            if self.listener is not None:
                self.listener.refuse(f"{func} is given functions")
            return run_higher_order(self, func, self._widened(args, self._narrow_places(args)), kwargs)
        asked = kwargs.get("dtype")
        if asked is not None and self._is_narrow(asked):
            kwargs = {**kwargs, "dtype": wide_dtype(asked, self.wide)}
        about = operator_facts(func)
        run = func
        if about.name in EMULATED:
            # Here, for most programs have none.
            from pytest_torchcompile.oracle.wide_operators import wide_version

            run = wide_version(about.name, func)
        call = RoundedCall(func, about, run)
        if not about.writes:
            call.narrow = self._narrow_places(args)
        decisions = self._decisions
        if decisions is not None and about.name not in decisions.operators:
            decisions = None
        if decisions is not None:
            call.decided = decisions.take(about, key_of(about, args), args, kwargs)
        if self.factor and call.decided is None:
            self._decide_noise(call, self._widened(args, call.narrow), asked)
        if self.listener is not None:
            return self.listener.note(self, call, args, kwargs)
        out = self.perform(call, args, kwargs)
        if decisions is not None:
            decisions.see(args, out)
        return out

    def perform(self, call: RoundedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator as was decided."""
        if call.decided is not None:
            return call.decided.clone()
        if call.about.random:
            drawn = self._replay.draw(call.func, args, self.wide)
            if drawn is not None:
                return drawn
        if call.narrow:
            args = self._widened(args, call.narrow)
        if call.rounds:
            return self._run_noisily(call, args, kwargs)
        out = call.run(*args, **kwargs)
        if call.copied:
            self._round_all(out, call.copied)
        return out

    def _decide_noise(self, call: RoundedCall, args: tuple[Any, ...], asked: torch.dtype | None) -> None:
        about = call.about
        if about.random or (about.exact and about.copies is None) or picks_one(about, args):
            return
        rounding = self._rounding_of(about, args)
        if about.copies is not None:
            call.copied = rounding.unit
            # A cast to a narrower dtype is all that rounds in a copy.
            if asked is not None:
                call.copied = min(rounding.unit, unit_of(asked)) if self._is_narrow(asked) else 0.0
            return
        call.rounds = True
        call.inputs = tuple(self._disturbed_inputs(about, args, rounding))
        call.written = call.fresh = rounding.unit
        if rounding.unit and about.accumulates:
            # A sum is kept in the accumulator's dtype, and rounded to that of the result once.
            of_accumulator = min(rounding.unit, self.accumulator)
            call.fresh = max(rounding.unit, of_accumulator * sum_roundings(about.name, args))

    def _run_noisily(self, call: RoundedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        about, hidden = call.about, []
        for position in about.running:
            if position < len(args) and self._can_round(args[position]) and not _is_expanded(args[position]):
                hidden.append((args[position], args[position].clone()))
        out = call.run(*self._disturb_inputs(call, args), **kwargs)
        for tensor, old in hidden:
            # Only what was written to. To ask whether anything was would wait for a GPU.
            rounded = tensor.clone()
            self._round_tensor(rounded, call.written)
            tensor.copy_(rounded.where(tensor != old, tensor))
        for written in written_tensors(about, args, kwargs):
            self._round_all(written, call.written)
        for result, fresh in zip(as_sequence(out), about.fresh, strict=False):
            if fresh:
                self._round_all(result, call.fresh)
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
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return False
        return value.dtype in self._wides and value.numel() > 0

    def _narrow_places(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple(i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and self._is_narrow(arg.dtype))

    def _widened(self, args: tuple[Any, ...], places: tuple[int, ...]) -> tuple[Any, ...]:
        if not places:
            return args
        widened = list(args)
        for place in places:
            widened[place] = widened[place].to(wide_dtype(widened[place].dtype, self.wide))
        return tuple(widened)

    def _disturbed_inputs(
        self, about: Operator, args: tuple[Any, ...], rounding: Rounding
    ) -> Iterator[tuple[int, float]]:
        unit = 0.0
        if about.accumulates:
            root = max(1.0, count_terms(about.name, args) ** 0.5)
            unit = max(min(self.accumulator, rounding.unit) * root, self._inputs.get(about.name, 0.0))
        if not unit and not rounding.inputs:
            return
        spared = None
        if about.name in PRODUCTS and not rounding.inputs:
            # noise in one factor does for both, and a weight need not be copied
            spared = max(filter(self._can_round, args), key=torch.Tensor.numel, default=None)
            unit *= 2**0.5
        for position, arg in enumerate(args):
            if position in about.running or position in about.writes or arg is spared:
                continue
            unit_here = max(unit, rounding.inputs.get(position, 0.0))
            if unit_here and (isinstance(arg, (list, tuple)) or self._can_round(arg)):
                yield position, unit_here

    def _disturb_inputs(self, call: RoundedCall, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not call.inputs:
            return args
        disturbed = list(args)
        for position, unit in call.inputs:
            arg = args[position]
            if isinstance(arg, torch.Tensor):
                disturbed[position] = self._dice.disturbed_copy(arg, self.factor * unit)
            else:
                disturbed[position] = pytree.tree_map(partial(self._disturbed, unit=unit), arg)
        return tuple(disturbed)

    def _disturbed(self, value: Any, unit: float) -> Any:
        return self._dice.disturbed_copy(value, self.factor * unit) if self._can_round(value) else value

    def _round_all(self, value: Any, unit: float) -> None:
        for tensor in as_sequence(value):
            if self._can_round(tensor):
                self._round_tensor(tensor, unit)

    def _round_tensor(self, tensor: torch.Tensor, unit: float) -> None:
        if not unit:
            return
        tensor = stored_numbers(tensor)
        # A sparse one may hold none.
        if not tensor.numel():
            return
        if tensor.numel() > 1 or tensor.is_complex():
            self._disturb(tensor, unit)
        elif tensor.device.type != "cpu":
            # To ask whether it is a size would be to wait for the GPU.
            before = tensor.clone()
            self._disturb(tensor, unit)
            tensor.copy_(before.where(_is_exact_size(before, unit), tensor))
        elif not _is_exact_size(tensor, unit):
            self._disturb(tensor, unit)

    def _disturb(self, tensor: torch.Tensor, unit: float) -> None:
        self._dice.disturb(tensor, self.factor * unit)
        if unit == _FLOAT16_UNIT:
            # float16 runs out of exponents: below 2**-14 the error is absolute
            self._dice.add_drift(tensor, self.factor * 2.0**-25, below=2.0**-14)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements have one place in memory: torch writes to no such tensor."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_exact_size(tensor: torch.Tensor, unit: float) -> torch.Tensor:
    """Whether one number is a whole one that rounding to ``unit`` keeps: nothing has rounded on the way to it.

    Models compute sizes so, as the ceiling of (length - kernel) / stride: with noise the ceiling is one more, and the
    model raises.
    """
    return (tensor == tensor.round()) & (tensor.abs() * unit <= 1)
