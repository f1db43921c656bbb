"""Leaf: what was observed about one output, gradient, buffer or property; and how far from the reference is too far.

Plain data, no torch: a stored leaf can be judged again under other limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeAlias

from pytest_torchcompile.errors import UsageError

__all__ = ["KINDS", "NOTED", "Leaf", "Limits", "Scalar", "is_excused", "is_stride", "note", "problem"]

Scalar: TypeAlias = "bool | int | float | str | None"

KINDS: Final = (
    "value", "gradient", "buffer", "mutation", "dtype", "shape", "stride", "alias", "requires_grad",
    "structure", "rng", "error", "nondeterministic", "zero_gradient", "zero_sign",
)  # fmt: skip
"""What a leaf can be about; a leaf whose values agree has the kind of its role."""

NOTED: Final = frozenset({"nondeterministic", "zero_gradient", "zero_sign"})
"""Kinds that are told and fail nothing by themselves."""


@dataclass(frozen=True)
class Leaf:
    """One thing that eager and compiled were compared in.

    ``rms``, ``bias`` and ``peak`` are multiples of this program's own rounding noise (``None``: bitwise
    equal, or no numbers); :func:`~pytest_torchcompile.oracle.leaf_limits.problem` judges them. ``message`` says
    what differs where no number of noise units could excuse it.
    """

    name: str
    kind: str
    numel: int = 1
    bitwise: bool = False
    dtype: str = ""
    rms: float | None = None
    """Error of the whole leaf over its noise, both as root mean square."""
    bias: float | None = None
    """Systematic part of the error (its projections on the result and on a constant) over the noise's."""
    peak: float | None = None
    """Largest error of one element over the noise of that element."""
    grain: float | None = None
    """Largest error of one element over one eps of the leaf's largest value, where that is 16 or less: of float32's
    eps for narrower dtypes too. Kernels that approximate (erf, expm1) are right to that, and no better near zero.
    ``None`` where most elements that are off are lost: above the noise, and off by half of what is expected or more.
    Approximations keep most values; a flush to zero, or to any constant, keeps none."""
    grain_off: float | None = None
    """As ``grain``, of the elements that are further off than noise explains: more than 4 times. ``None`` also where
    the others are shifted, each by less."""
    undecidable: int = 0
    """Discrete elements that differ and that rounding alone flips too: ties of argmax, top-k, comparisons."""
    blind: int = 0
    """Elements about which nothing can be said: their rounding noise is as large as their values, or flips them."""
    beside_own: float | None = None
    """The largest error over eager's own largest, of a leaf that is all noise; None for others, or if eager has
    none."""
    drowned: bool = False
    """Whether it stays undecided even if the few draws that it may get yet show no noise."""
    wrong: float = 0.0
    """Share of the elements that are further from the expected value than noise explains."""
    index: tuple[int, ...] | None = None
    """Where the values below were read: the first wrong element, or the worst one if none is wrong alone."""
    eager: Scalar = None
    compiled: Scalar = None
    expected: Scalar = None
    against: str = "eager"
    """What the error was measured from: ``Reference.kind``, or ``eager`` where the reference is no use."""
    why: str = ""
    """Why it was not measured from a float64 run with noise at every operator."""
    draws: int = 0
    """How many noise draws the scale was made from, eager's own rounding among them."""
    moved_by_noise: bool = False
    """Is it a parameter after steps of training, of whose gradients one or more are nothing but rounding noise?"""
    excused: str = ""
    """The largest difference that noise excuses, if it is far more than a rounding of the value: 10 for 9."""
    message: str = ""
    ranks: bool = False
    """Is it eager on both sides: ``eager`` of one process, and ``compiled`` of the ranks beside it?"""

    @property
    def decided(self) -> bool:
        """Whether the comparison could have failed: not if eager wavers, or noise is as large as all of the values."""
        if self.kind == "nondeterministic" or self.moved_by_noise:
            return False
        return self.bitwise or bool(self.message) or self.blind < self.numel

    @property
    def numerical(self) -> bool:
        """Whether limits decide about this leaf."""
        return self.rms is not None

    @property
    def far_off(self) -> bool:
        """Whether most elements are off, and the leaf as a whole by a hundred times its noise."""
        return self.far_off_among(self.numel)

    def far_off_among(self, elements: int) -> bool:
        """:attr:`far_off` of a leaf of which only so many elements have a value: of words that occur, say."""
        return self.rms is not None and self.rms > _FAR_OFF and self.wrong * self.numel > elements / 2

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; NaN and infinity become strings (``nan``, ``inf``, ``-inf``); defaults are omitted."""
        plain: dict[str, Any] = {"name": self.name, "kind": self.kind}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in plain and value != field.default:
                plain[field.name] = list(value) if isinstance(value, tuple) else _finite(value)
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Leaf:
        """Read :meth:`to_dict` back; keys of a newer version are ignored."""
        known = {field.name: plain[field.name] for field in fields(cls) if field.name in plain}
        for name in ("rms", "bias", "peak", "grain", "grain_off", "wrong", "beside_own"):
            if isinstance(known.get(name), str):
                known[name] = float(known[name])
        for name in ("eager", "compiled", "expected"):
            if known.get(name) in ("nan", "inf", "-inf"):
                known[name] = float(known[name])
        if known.get("index") is not None:
            known["index"] = tuple(known["index"])
        return cls(**known)


def _finite(value: Any) -> Any:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


# ----------------------------------------------------------------------------------------------------------- its limits
OFF: Final = 4.0
"""Times its noise from which on an element counts as off in ``Leaf.grain_off``: the usual limit of ``rms``, so that
elements that are nearer exceed no limit, each by itself or together."""
# Times its noise as a whole: random numbers that are other ones leave far more, and gates that noise flips less.
_FAR_OFF = 100.0
_SIDES = " (uncompiled on both sides: what is called eager is one process, and compiled the ranks)"
# So many times the limits for a leaf that is nothing but noise: how far total cancellation carries it is least known.
# The gradient of a bias before a batch norm reaches rms 4.4 in float32, leaves that mean something 1.3.
_OF_NOISE = 4.0
# And for its worst element, whose noise is known from few draws and varies from element to element. Correct programs
# reached 110 units in training with TF32 convolutions, where the limit of leaves that mean something is 24.
_WORST_OF_NOISE = 8.0
# And that worst element passes up to so many times eager's own largest error in the leaf. Where noise flips decisions,
# as of a relu, a few elements have more of it than draws show: up to 1,080 units in a mobilenet_v3 on an H200. Eager
# and compiled have their largest from one distribution.
_BESIDE_OWN = 4.0
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
    if text is None or _is_small(leaf, limits):
        return None
    return f"{leaf.name}: {text}{_values_text(leaf)}"


def _is_small(leaf: Leaf, limits: Limits) -> bool:
    """Whether what exceeds the limits is small beside the largest value of the leaf."""
    if leaf.grain is not None and leaf.grain <= limits.grain:
        return True
    # With stricter limits an element can exceed them that does not count as off.
    usual = min(limits.rms, limits.peak) >= OFF
    return usual and leaf.grain_off is not None and leaf.grain_off <= limits.grain


def is_excused(leaf: Leaf, limits: Limits | None = None) -> bool:
    """Whether a leaf exceeds a limit, and passes all the same because the error is small beside its largest value."""
    limits = limits or Limits()
    if leaf.kind in NOTED or leaf.message:
        return False
    return _excess_text(leaf, limits) is not None and problem(leaf, limits) is None


def is_stride(leaf: Leaf) -> bool:
    """Whether a leaf says that strides differ; a sparse tensor for a dense one is another matter."""
    return leaf.kind == "stride" and leaf.message.startswith("stride is ")


def _excess_text(leaf: Leaf, limits: Limits) -> str | None:
    """Which limit of rounding noise a leaf exceeds, and by how much."""
    if leaf.bitwise:
        return None
    if leaf.rms is None or leaf.bias is None or leaf.peak is None:
        return None
    rms, bias, peak = limits.of(leaf.numel)
    if not leaf.decided:
        rms, bias, peak = _OF_NOISE * rms, _OF_NOISE * bias, _WORST_OF_NOISE * peak
    # not (a <= b), so that NaN is a problem
    if not leaf.rms <= rms:
        return f"error is {leaf.rms:.3g} times the rounding noise (limit {rms:.3g})"
    if not leaf.bias <= bias:
        return f"a systematic offset, {leaf.bias:.3g} times what rounding explains (limit {bias:.3g})"
    if not leaf.peak <= peak and not _is_usual_in_noise(leaf):
        return f"one element is {leaf.peak:.3g} times its rounding noise away (limit {peak:.3g})"
    return None


def _is_usual_in_noise(leaf: Leaf) -> bool:
    """Whether the worst element of a leaf of nothing but noise is about as far off as eager's own worst."""
    return not leaf.decided and leaf.beside_own is not None and leaf.beside_own <= _BESIDE_OWN


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
        if leaf.moved_by_noise:
            why = "the steps that moved it are no larger than their rounding noise"
        return f"{leaf.name}: undecidable, {why}{_values_text(leaf)}"
    if is_excused(leaf):
        text = _excess_text(leaf, Limits())
        return f"{leaf.name}: {text}, but less than one eps of its largest value{_values_text(leaf)}"
    if leaf.excused:
        return f"{leaf.name}: {leaf.excused}"
    if leaf.undecidable:
        why = "rounding alone flips them"
        if leaf.numerical:
            why = "eager itself overflows or rounding decides about it"
        count = f"{leaf.undecidable} of {leaf.numel} elements differ and are undecidable"
        return f"{leaf.name}: {count}: {why}{_values_text(leaf)}"
    return None


_SOURCES: Final = {
    "float64": "a float64 run",
    "same-precision": "another run in float64",
    "float32": "a float32 run",
    "float64-inputs": "a float64 run",
    "eager-draws": "eager itself",
    "eager-only": "eager itself",
    "eager": "eager itself",
}
"""``Leaf.against``, in words."""


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
    # A kind of a newer version is told as it is.
    source = _SOURCES.get(leaf.against, leaf.against)
    return f"{where}: {values}{share} ({leaf.dtype or 'no dtype'}; expected comes from {source})"


def _number_text(value: Scalar) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
