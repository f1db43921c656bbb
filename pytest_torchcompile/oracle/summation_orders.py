"""Other orders of summation: by how much code that adds up otherwise than eager does may be off, and be right.

Where terms of a sum repeat, float32 rounds each addition alike: the errors of a loop point one way and grow with the
number of terms. No noise of single terms shows that. ``torch.ones`` as input is enough, or an image of one colour.

So eager is run again in its own precision, and each such sum is added up in a few loops, one number after the other.
What differs from the float64 run is no estimate: such a loop makes that error of these very numbers.
Sums that the dtype holds exactly, as counts are, come out the same in each order, and excuse nothing.

It is asked last, of leaves on a CPU that no draw of noise has cleared; what it excuses is told in a note.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchcompile.backends.decomposition_tables import decomposition_of
from pytest_torchcompile.oracle.noise_levels import sample_elements
from pytest_torchcompile.oracle.operator_rounding import FLOAT32_UNIT, operator_facts, unit_of
from pytest_torchcompile.oracle.program import Program
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.state.tensor_forms import is_plain

__all__ = ["LOOPS", "OtherOrder", "run_in_other_orders"]

LOOPS: Final = (1, 2, 3, 5, 8, 16)
"""Into how many loops the terms of a sum are split, in one run each: Inductor's have one, or one for each lane."""
_FEWEST_TERMS: Final = 16
# Longer sums would take seconds.
_MOST_TERMS: Final = 1 << 21
# Operators that add up in one go in eager, and that compilers write as sums.
_WRITTEN_OUT: Final = frozenset({
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "linalg_vector_norm", "mean", "mse_loss",
    "native_batch_norm", "native_batch_norm_backward", "native_group_norm", "native_group_norm_backward",
    "native_layer_norm", "native_layer_norm_backward", "smooth_l1_loss", "std", "std_mean", "var", "var_mean",
})  # fmt: skip
# What torch writes the variance of all of these as.
_VARIANCE: Final = "prims::var"


def run_in_other_orders(program: Program) -> list[Recording]:
    """Eager runs of a program; none where no sum is added up otherwise: then nothing could differ."""
    recordings: list[Recording] = []
    for loops in LOOPS:
        mode = OtherOrder(loops)
        recording = program.run_eager(mode)
        if not mode.changed:
            return []
        if recording.error is None:
            recordings.append(recording)
    return recordings


class OtherOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs a program with its sums of terms that repeat added up in ``loops`` loops; ``changed``: there was one."""

    supports_higher_order_operators = True

    def __init__(self, loops: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.loops = loops
        self.changed = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        # ``torch.cond`` and its like, torch 2.8 to 2.15.
        if isinstance(func, torch._ops.HigherOrderOperator):
            # Here, for most programs have none.
            from pytest_torchcompile.oracle.higher_order import run_higher_order

            return run_higher_order(self, func, args, kwargs)
        about = operator_facts(func)
        if about.writes:
            return func(*args, **kwargs)
        if func._schema.name == _VARIANCE:
            with self:
                return _variance(*args)
        if about.name == "sum":
            total = self._add_up(args, kwargs)
            if total is not None:
                return total
        elif about.name in _WRITTEN_OUT and (written_out := decomposition_of(func)) is not None:
            with self:
                return written_out(*args, **kwargs)
        return func(*args, **kwargs)

    def _add_up(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """``aten::sum`` in loops; None for a sum that is none of those: short, or of terms that differ."""
        terms = args[0]
        dtype = kwargs.get("dtype") or terms.dtype
        if not _is_looked_at(terms) or not dtype.is_floating_point or unit_of(dtype) > FLOAT32_UNIT:
            return None
        named = args[1] if len(args) > 1 else None
        axes = sorted({axis % terms.dim() for axis in named or range(terms.dim())})
        count = math.prod(terms.shape[axis] for axis in axes)
        if not _FEWEST_TERMS <= count <= _MOST_TERMS or not terms.numel():
            return None
        kept = [axis for axis in range(terms.dim()) if axis not in axes]
        rows = terms.detach().to(dtype).permute([*axes, *kept]).reshape(count, -1)
        if not _most_come_again(rows):
            return None
        self.changed = True
        total = _added_in_loops(rows, self.loops)
        shape = [terms.shape[axis] for axis in kept]
        if len(args) > 2 and args[2]:
            shape = [1 if axis in axes else terms.shape[axis] for axis in range(terms.dim())]
        return total.reshape(shape)


def _is_looked_at(terms: Any) -> bool:
    """Of a narrower dtype sums are kept in float32, which holds them exactly for longer."""
    if not isinstance(terms, torch.Tensor) or not terms.is_floating_point() or not is_plain(terms):
        return False
    return terms.device.type == "cpu" and unit_of(terms.dtype) <= FLOAT32_UNIT and terms.dim() > 0


def _most_come_again(rows: torch.Tensor) -> bool:
    """Whether half of the terms or more equal another one. Zeros add nothing, and count as nothing."""
    sample = sample_elements(rows)
    present = sample[sample != 0]
    ordered = present.sort().values
    different = 1 + int((ordered[1:] != ordered[:-1]).sum())
    return 2 * different <= present.numel()


def _variance(terms: torch.Tensor, axes: Sequence[int] | None, correction: float | None = 1) -> torch.Tensor:
    """``prims::var``: the mean first, then the squares of what is left; torch has it in one operator."""
    axes = list(axes if axes is not None else range(terms.dim()))
    squares = (terms - terms.mean(axes, keepdim=True)).square()
    count = math.prod(terms.shape[axis] for axis in axes)
    return squares.sum(axes) / max(0.0, count - (1 if correction is None else correction))


def _added_in_loops(rows: torch.Tensor, loops: int) -> torch.Tensor:
    """The sum over the first axis of ``(terms, sums)``; neighbours in one loop, and then the loops' sums one by one.

    On a CPU ``index_add_`` adds row after row in the dtype itself (torch 2.8 to 2.15; a test holds it), where ``sum``
    adds in blocks and ``cumsum`` in float64.
    """
    length = math.ceil(len(rows) / loops)
    places = torch.arange(len(rows)).div(length, rounding_mode="floor")
    sums = rows.new_zeros(loops, rows.shape[1]).index_add_(0, places, rows)
    total = sums[0]
    for each in sums[1:]:
        total = total + each
    return total
