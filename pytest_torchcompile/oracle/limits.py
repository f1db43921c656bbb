"""How far from the reference is too far; a stored leaf can be judged again under other limits. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.oracle.leaf import NOTED, Leaf, Scalar

__all__ = ["Limits", "is_excused", "note", "problem"]

_SIDES = " (uncompiled on both sides: what is called eager is one process, and compiled the ranks)"
# So many times the limits for a leaf that is nothing but noise: how far total cancellation carries it is least known.
# The gradient of a bias before a batch norm reaches rms 4.4 in float32, leaves that mean something 1.3.
_OF_NOISE = 4.0
# Elements among which the worst one is within ``Limits.peak``.
_USUAL = 1 << 16


@dataclass(frozen=True)
class Limits:
    """The largest ratios of error to rounding noise that pass.

    Correct programs reached rms 3.4, bias 6.4 and peak 12 in 7 400 runs of 13 models (fp32, bf16, fp16). The
    unit is the noise of the very program under test, so these are no tolerances and need no tuning per model.

    A leaf of one element is a single draw of the noise: its ``rms`` and ``bias`` are no averages and may be as
    large as a peak. :meth:`of` passes from one to the other.
    """

    rms: float = 4.0
    bias: float = 8.0
    peak: float = 16.0
    grain: float = 1.0
    """An error up to so many eps of the leaf's largest value is no problem, whatever its noise, where most of the
    values that are off are still there: see ``Leaf.grain``. It is noted: see :func:`is_excused`."""
    looks: int = 0
    """Elements that were looked at together, in all leaves, calls and steps; 0: those of the leaf alone."""

    def of(self, numel: int) -> tuple[float, float, float]:
        """Limits of rms, bias and peak for a leaf of ``numel`` elements."""
        peak = self.peak * _tail_factor(max(numel, self.looks))
        return self.rms * (1 + 3 / max(1, numel)), self.bias * (1 + 1 / max(1, numel)), peak

    def over(self, leaves: Iterable[Leaf]) -> Limits:
        """The same limits for leaves that are looked at together."""
        return replace(self, looks=sum(leaf.numel for leaf in leaves if leaf.numerical))

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0:
                raise UsageError(f"limit {field.name!r} is {value!r}, expected a number that is zero or more")


def _tail_factor(looks: int) -> float:
    """By how much the limit of the worst element grows with the number of elements looked at.

    The noise of one element is known from a few draws, so errors in units of it have an exponential tail, not a normal
    one. Among twice as many elements the worst is one more unit away: 16 units among 65,536, 21 among 2.4 million.
    """
    return 1 + max(0.0, math.log2(max(1, looks) / _USUAL)) / 16


def problem(leaf: Leaf, limits: Limits | None = None) -> str | None:
    """Say in one line what is wrong with this leaf, or ``None``."""
    if leaf.kind in NOTED:
        return None
    limits = limits or Limits()
    if leaf.message:
        sides = _SIDES if leaf.ranks else ""
        return f"{leaf.name}: {leaf.message}{_values_text(leaf)}{sides}"
    text = _excess_text(leaf, limits)
    # Small beside the largest value of the leaf: see ``Limits.grain``.
    if text is None or (leaf.grain is not None and leaf.grain <= limits.grain):
        return None
    return f"{leaf.name}: {text}{_values_text(leaf)}"


def is_excused(leaf: Leaf, limits: Limits | None = None) -> bool:
    """Whether a leaf exceeds a limit, and passes all the same because the error is small beside its largest value."""
    limits = limits or Limits()
    if leaf.kind in NOTED or leaf.message:
        return False
    return _excess_text(leaf, limits) is not None and problem(leaf, limits) is None


def _excess_text(leaf: Leaf, limits: Limits) -> str | None:
    """Which limit of rounding noise a leaf exceeds, and by how much."""
    if leaf.bitwise:
        return None
    if leaf.rms is None or leaf.bias is None or leaf.peak is None:
        return None
    slack = 1.0 if leaf.decided else _OF_NOISE
    rms, bias, peak = (slack * limit for limit in limits.of(leaf.numel))
    # not (a <= b), so that NaN is a problem
    if not leaf.rms <= rms:
        return f"error is {leaf.rms:.3g} times the rounding noise (limit {rms:.3g})"
    if not leaf.bias <= bias:
        return f"a systematic offset, {leaf.bias:.3g} times what rounding explains (limit {bias:.3g})"
    if not leaf.peak <= peak:
        return f"one element is {leaf.peak:.3g} times its rounding noise away (limit {peak:.3g})"
    return None


def note(leaf: Leaf) -> str | None:
    """Say in one line what is worth knowing about a leaf that is no problem, or ``None``.

    Most often that it could not be decided.
    """
    if leaf.kind in NOTED:
        return f"{leaf.name}: {leaf.message}{_values_text(leaf)}"
    if leaf.message or leaf.bitwise:
        return None
    if not leaf.decided:
        why = "rounding alone flips all of it"
        if leaf.numerical:
            why = "its values are no larger than their rounding noise"
        return f"{leaf.name}: undecidable, {why}{_values_text(leaf)}"
    if is_excused(leaf):
        text = _excess_text(leaf, Limits())
        return f"{leaf.name}: {text}, but less than one eps of its largest value{_values_text(leaf)}"
    if leaf.undecidable:
        why = "rounding alone flips them"
        if leaf.numerical:
            why = "eager itself overflows or rounding decides about it"
        count = f"{leaf.undecidable} of {leaf.numel} elements differ and are undecidable"
        return f"{leaf.name}: {count}: {why}{_values_text(leaf)}"
    return None


def _values_text(leaf: Leaf) -> str:
    if leaf.index is None:
        return ""
    where, share = "", ""
    if leaf.index:
        where = f" at {list(leaf.index)}"
    if leaf.wrong and leaf.numel > 1:
        share = f"; {leaf.wrong:.2%} of {leaf.numel} elements wrong"
    one, other = ("one process", "ranks") if leaf.ranks else ("eager", "compiled")
    values = (f"{one} {_number_text(leaf.eager)}, {other} {_number_text(leaf.compiled)}, "
              f"expected {_number_text(leaf.expected)}")
    return f"{where}: {values}{share} (measured from {leaf.against}, {leaf.dtype or 'no dtype'})"


def _number_text(value: Scalar) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
