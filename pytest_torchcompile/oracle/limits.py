"""How far from the reference is too far; a stored leaf can be judged again under other limits. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.oracle.leaf import NOTED, Leaf, Scalar

__all__ = ["Limits", "note", "problem"]

_SIDES = " (uncompiled on both sides: what is called eager is one process, and compiled the ranks)"
_OF_NOISE = 4.0
"""So many times the limits for a leaf that is nothing but noise: how far total cancellation carries it is least known.
The gradient of a bias before a batch norm reaches rms 4.4 in float32, leaves that mean something 1.3."""


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

    def of(self, numel: int) -> tuple[float, float, float]:
        """Limits of rms, bias and peak for a leaf of ``numel`` elements."""
        return self.rms * (1 + 3 / max(1, numel)), self.bias * (1 + 1 / max(1, numel)), self.peak

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0:
                raise UsageError(f"limit {field.name!r} is {value!r}, expected a number that is zero or more")


def problem(leaf: Leaf, limits: Limits | None = None) -> str | None:
    """Say in one line what is wrong with this leaf, or ``None``."""
    if leaf.kind in NOTED:
        return None
    limits = limits or Limits()
    if leaf.message:
        return f"{leaf.name}: {leaf.message}{_values(leaf)}{_SIDES if leaf.ranks else ''}"
    if leaf.bitwise:
        return None
    if leaf.rms is None or leaf.bias is None or leaf.peak is None:
        return None
    slack = 1.0 if leaf.decided else _OF_NOISE
    rms, bias, peak = (slack * limit for limit in limits.of(leaf.numel))
    # not (a <= b), so that NaN is a problem
    if not leaf.rms <= rms:
        text = f"error is {leaf.rms:.3g} times the rounding noise (limit {rms:.3g})"
    elif not leaf.bias <= bias:
        text = f"a systematic offset, {leaf.bias:.3g} times what rounding explains (limit {bias:.3g})"
    elif not leaf.peak <= peak:
        text = f"one element is {leaf.peak:.3g} times its rounding noise away (limit {peak:.3g})"
    else:
        return None
    return f"{leaf.name}: {text}{_values(leaf)}"


def note(leaf: Leaf) -> str | None:
    """Say in one line what is worth knowing about a leaf that is no problem, or ``None``.

    Most often that it could not be decided.
    """
    if leaf.kind in NOTED:
        return f"{leaf.name}: {leaf.message}{_values(leaf)}"
    if leaf.message or leaf.bitwise:
        return None
    if not leaf.decided:
        why = "rounding alone flips all of it"
        if leaf.numerical:
            why = "its values are no larger than their rounding noise"
        return f"{leaf.name}: undecidable, {why}{_values(leaf)}"
    if leaf.undecidable:
        why = "eager itself overflows or rounding decides about it" if leaf.numerical else "rounding alone flips them"
        count = f"{leaf.undecidable} of {leaf.numel} elements differ and are undecidable"
        return f"{leaf.name}: {count}: {why}{_values(leaf)}"
    return None


def _values(leaf: Leaf) -> str:
    if leaf.index is None:
        return ""
    where = f" at {list(leaf.index)}" if leaf.index else ""
    share = f"; {leaf.wrong:.2%} of {leaf.numel} elements wrong" if leaf.wrong and leaf.numel > 1 else ""
    values = (leaf.eager, leaf.compiled, leaf.expected)
    mine, found = ("one process", "ranks") if leaf.ranks else ("eager", "compiled")
    found = "{} {}, {} {}, expected {}".format(mine, _number(values[0]), found, *map(_number, values[1:]))
    return f"{where}: {found}{share} (measured from {leaf.against}, {leaf.dtype or 'no dtype'})"


def _number(value: Scalar) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
