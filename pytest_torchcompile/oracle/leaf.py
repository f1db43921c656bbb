"""Leaf: what was observed about one output, gradient, buffer or property. Plain data, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

__all__ = ["KINDS", "NOTED", "Leaf", "Scalar"]

Scalar: TypeAlias = "bool | int | float | str | None"

KINDS: Final = (
    "value", "gradient", "buffer", "mutation", "dtype", "shape", "stride", "alias", "requires_grad",
    "structure", "rng", "error", "nondeterministic", "zero_gradient",
)  # fmt: skip
"""What a leaf can be about; a leaf whose values agree has the kind of its role."""

NOTED: Final = frozenset({"nondeterministic", "zero_gradient"})
"""Kinds that are told and fail nothing by themselves."""


@dataclass(frozen=True)
class Leaf:
    """One thing that eager and compiled were compared in.

    ``rms``, ``bias`` and ``peak`` are multiples of this program's own rounding noise (``None``: bitwise
    equal, or no numbers); :func:`~pytest_torchcompile.oracle.limits.problem` judges them. ``message`` says
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
    undecidable: int = 0
    """Discrete elements that differ and that rounding alone flips too: ties of argmax, top-k, comparisons."""
    blind: int = 0
    """Elements about which nothing can be said: their rounding noise is as large as their values, or flips them."""
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
    message: str = ""
    ranks: bool = False
    """Is it eager on both sides: ``eager`` of one process, and ``compiled`` of the ranks beside it?"""

    @property
    def decided(self) -> bool:
        """Whether the comparison could have failed: not if eager wavers, or noise is as large as all of the values."""
        if self.kind == "nondeterministic":
            return False
        return self.bitwise or bool(self.message) or self.blind < self.numel

    @property
    def numerical(self) -> bool:
        """Whether limits decide about this leaf."""
        return self.rms is not None

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
        for name in ("rms", "bias", "peak", "grain", "wrong"):
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
