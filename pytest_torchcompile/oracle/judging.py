"""Numbers against numbers: how far two values are from the reference, in units of rounding noise."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pytest_torchcompile.oracle.estimate import Estimate, as_real, finite, pieces
from pytest_torchcompile.oracle.leaf import Leaf
from pytest_torchcompile.oracle.limits import Limits, problem
from pytest_torchcompile.oracle.units import unit_of

__all__ = ["continuous", "discrete"]

_BIAS_FLOOR = 2.0**-20
"""Relative offset that is never complained about: 16 roundings of float32."""
_UNFIT = 32.0
"""Eager this many noise scales away from the reference: they are not the same program (the worst of 13 models: 2.5)."""
_EAGER_ONLY_UNITS = 16.0
"""Without a reference: the noise is taken to be this many units roundoff of the value and of its leaf's mean size."""


@dataclass(frozen=True)
class _Scale:
    """The noise of a leaf: ``pooled`` mean square, and what projections and elements are divided by."""

    centre: torch.Tensor
    spread: torch.Tensor | None
    means: list[float]
    along: list[float]
    offset: list[float]
    norm: float
    unit: float
    tiny: float
    eager: torch.Tensor | None
    """The eager values, where their error counts as a draw."""
    relative: float = 0.0
    """Assumed relative noise, where nothing was drawn."""


def continuous(leaf: Leaf, eager: torch.Tensor, compiled: torch.Tensor, estimate: Estimate | None, kind: str, limits: Limits) -> Leaf:
    """Fill in the errors of a floating or complex leaf that is not bitwise equal."""
    dtype = eager.dtype.to_real() if eager.is_complex() else eager.dtype
    e, c = as_real(eager.detach()), as_real(compiled.detach())
    fits = estimate is not None and estimate.continuous and estimate.value.shape == e.shape and kind != "eager-only"
    if estimate is None or not fits:
        twin = estimate if kind == "eager-only" else None
        return _against(replace(leaf, against="eager-only"), e, c, _assumed(e, dtype, twin), limits, None)
    scale = _drawn(e, dtype, estimate, with_eager=True)
    drawn = sum(estimate.means) / max(1, len(estimate.means))
    floor = unit_of(dtype) * estimate.norm / max(1, e.numel()) ** 0.5
    if scale.means[0] <= _UNFIT**2 * max(drawn, floor**2):
        return _against(replace(leaf, against=kind, draws=len(scale.means)), e, c, scale, limits, estimate.reach)
    # Eager itself is far from the reference. If its error counted, anything would pass; so the compiled result has to be
    # near one of the two, by the noise of the draws alone.
    alone = _drawn(e, dtype, estimate, with_eager=False)
    near = replace(leaf, against=kind, draws=len(alone.means))
    from_reference = _against(near, e, c, alone, limits, estimate.reach)
    if problem(from_reference, limits) is None:
        return from_reference
    return _against(replace(near, against="eager"), e, c, replace(alone, centre=e.double()), limits, estimate.reach)


def discrete(leaf: Leaf, eager: torch.Tensor, compiled: torch.Tensor, estimate: Estimate | None) -> Leaf:
    """Judge integers and booleans: equal, except where rounding alone flips an element."""
    differ = (eager != compiled).flatten()
    loose = torch.zeros_like(differ)
    fits = estimate is not None and isinstance(estimate.value, torch.Tensor) and estimate.value.shape == eager.shape
    expected = eager
    if estimate is not None and fits:
        expected = estimate.value
        loose |= (eager != expected).flatten()
        if estimate.flips is not None:
            loose |= estimate.flips.flatten()
    hard = differ & ~loose
    undecidable = int((differ & loose).sum())
    wrong = int(hard.sum())
    first = int((hard if wrong else differ).nonzero()[0])
    leaf = _shown(leaf, first, eager, compiled, expected)
    leaf = replace(leaf, undecidable=undecidable, wrong=wrong / leaf.numel, draws=len(estimate.means) if estimate else 0)
    if wrong:
        return replace(leaf, message=f"{wrong} of {leaf.numel} elements differ although rounding can't flip them")
    return leaf


def _drawn(e: torch.Tensor, dtype: torch.dtype, estimate: Estimate, *, with_eager: bool) -> _Scale:
    means, along, offset = list(estimate.means), list(estimate.along), list(estimate.offset)
    if with_eager:
        squares = projection = total = 0.0
        for mine, exact in pieces(e, estimate.value):
            error = finite(mine.double() - exact)
            squares += float(error.square().sum())
            projection += float((error * finite(exact)).sum())
            total += float(error.sum())
        count = max(1, e.numel())
        means.insert(0, squares / count)
        along.insert(0, (projection / estimate.norm) ** 2 if estimate.norm > 0 else 0.0)
        offset.insert(0, total**2 / count)
    return _Scale(
        estimate.value, estimate.spread, means, along, offset, estimate.norm, unit_of(dtype), _tiny(dtype),
        e if with_eager else None,
    )  # fmt: skip


def _assumed(e: torch.Tensor, dtype: torch.dtype, twin: Estimate | None) -> _Scale:
    """Eager as the centre; the noise assumed from its dtype, or what a second eager run shows if that is more."""
    wide = finite(e.double())
    size = float(wide.square().mean().sqrt())
    noise = _EAGER_ONLY_UNITS * unit_of(dtype)
    spread = None
    mean = (noise * size) ** 2
    if twin is not None and twin.continuous and twin.value.shape == e.shape:
        again = finite(twin.value.double() - e.double())
        mean = max(mean, float(again.square().mean()))
        spread = again.abs().flatten()
    norm = size * e.numel() ** 0.5
    # an offset of the whole leaf by the assumed noise is one unit of bias
    return _Scale(
        e.double(), spread, [mean], [(noise * norm) ** 2], [(noise * norm) ** 2], norm, unit_of(dtype), _tiny(dtype), None, noise
    )  # fmt: skip


def _against(leaf: Leaf, e: torch.Tensor, c: torch.Tensor, scale: _Scale, limits: Limits, reach: torch.Tensor | None) -> Leaf:
    """Measure the error of ``c`` from the centre of the scale, piece by piece."""
    hard = _overflow(leaf, e, c, scale.centre, reach)
    if hard is not None:
        return hard
    draws = scale.means[1:] if scale.eager is not None else scale.means
    pooled = max(scale.means[0] if scale.means else 0.0, sum(draws) / max(1, len(draws)))
    weight = len(scale.means) if scale.relative == 0.0 else 0
    squares = floors = along = offset = peak = 0.0
    wrong, worst, first = 0, 0, -1
    start = 0
    empty = scale.spread if scale.spread is not None else torch.zeros((), device=c.device).expand(c.numel())
    mine = scale.eager if scale.eager is not None else scale.centre
    for exact, found, spread, own in pieces(scale.centre, c, empty, mine):
        exact = exact.double()
        use = torch.isfinite(exact) & torch.isfinite(found)
        error = torch.where(use, found.double() - exact, 0.0)
        exact = finite(exact)
        floor = scale.unit * exact.abs() + scale.tiny
        drawn = spread.double().square() + finite(own.double() - exact).square()
        s = ((drawn + pooled) / (weight + 1)).sqrt()
        s = torch.maximum(torch.maximum(s, floor), scale.relative * exact.abs())
        ratio = error.abs() / s
        squares += float(error.square().sum())
        floors += float(floor.square().sum())
        along += float((error * exact).sum())
        offset += float(error.sum())
        wrong += int((ratio > limits.rms).sum())
        top = float(ratio.amax())
        if top > peak:
            peak, worst = top, start + int(ratio.argmax())
        if first < 0 and top > limits.peak:
            first = start + int((ratio > limits.peak).nonzero()[0])
        start += found.numel()
    count = c.numel()
    n = len(scale.means)
    least = _BIAS_FLOOR * scale.norm / limits.bias if limits.bias else 0.0
    biases = (
        (abs(along) / scale.norm if scale.norm > 0 else 0.0, scale.along),
        (abs(offset) / count**0.5, scale.offset),
    )
    bias = max(b / max(((sum(p) + 2 * pooled) / (n + 2)) ** 0.5 + least, 1e-300) for b, p in biases)
    leaf = _shown(leaf, first if first >= 0 else worst, e, c, scale.centre)
    rms = (squares / max(pooled * count, floors)) ** 0.5
    return replace(leaf, rms=rms, bias=bias, peak=peak, wrong=wrong / count)


def _overflow(leaf: Leaf, e: torch.Tensor, c: torch.Tensor, exact: torch.Tensor, reach: torch.Tensor | None) -> Leaf | None:
    """A leaf with a message where NaN or infinity differ and no rounding explains it."""
    largest = torch.finfo(c.dtype).max
    start = 0
    near = reach if reach is not None else torch.zeros((), device=c.device).expand(c.shape)
    for mine, found, truth, size in pieces(e, c, exact, near):
        bad = ~(torch.isfinite(mine) & torch.isfinite(found))
        if bool(bad.any()):
            same = (mine == found) | (mine.isnan() & found.isnan())
            better = ~torch.isfinite(mine) & torch.isfinite(found) & torch.isfinite(truth)
            hard = bad & ~same & ~better & ~(size > 0.9 * largest)
            if bool(hard.any()):
                count = int(hard.sum())
                shown = _shown(leaf, start + int(hard.nonzero()[0]), e, c, exact)
                return replace(
                    shown, wrong=count / c.numel(), message="NaN or infinity where eager has none, or the other way round"
                )
        start += found.numel()
    return None


def _shown(leaf: Leaf, flat: int, e: torch.Tensor, c: torch.Tensor, expected: torch.Tensor) -> Leaf:
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), e.shape)) if e.dim() else ()
    return replace(leaf, index=index, eager=e[index].item(), compiled=c[index].item(), expected=expected[index].item())


def _tiny(dtype: torch.dtype) -> float:
    """Absolute floor: half the distance between subnormals, some for float16, whose subnormals are in daily use."""
    info = torch.finfo(dtype)
    return 2.0**-25 if dtype == torch.float16 else info.tiny * info.eps / 2
