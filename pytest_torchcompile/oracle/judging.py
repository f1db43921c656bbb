"""Numbers against numbers: how far a compiled value is from the expected one, in units of rounding noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, sqrt
from typing import Any, Final

import torch

from pytest_torchcompile.oracle.dice import FEW
from pytest_torchcompile.oracle.error_tally import ErrorTally, split_leaf
from pytest_torchcompile.oracle.estimate import Estimate, as_real, finite_values, small_to_cpu, split_pieces
from pytest_torchcompile.oracle.expected import WIDER, Reference
from pytest_torchcompile.oracle.leaf_limits import OFF, Leaf, Limits, problem
from pytest_torchcompile.oracle.measurement import Measurement, read_numbers
from pytest_torchcompile.oracle.noise_levels import Projections
from pytest_torchcompile.oracle.scale import Scale, scale_from_draws, scale_from_dtype, scale_from_eager
from pytest_torchcompile.state.tensor_forms import computable

__all__ = ["ASIDE", "BIAS_FLOOR", "OTHER_DECISIONS", "ROUNDING_MOVES", "excused_difference", "grain_of", "index_of",
           "judge_beside_orders", "judge_numbers", "judge_values", "limits_without_draws", "new_leaf", "with_values"]

ROUNDING_MOVES: Final = "rounding alone can move it so far"
OTHER_DECISIONS: Final = ("compiled code rounds to another whole number where only rounding decides, "
                          "and it is right beside that one")
"""Why a difference from eager is excused."""
BIAS_FLOOR: Final = 2.0**-20
"""Relative offset that is never complained about: 16 roundings of float32."""
# Eager this many noise scales off the reference: not the same program (the worst of 13 models had 2.5).
_UNFIT = 32.0
ASIDE: Final = 2.0
"""From so many on it is no chance any more: something rounds in eager that nobody knows, such as a plain number that is
given to an operator. HF's mobilenet_v2 has a batch norm with a momentum of 0.997, which float32 does not hold."""
# Times what the worst of a few orders of summation is off: compiled code may have yet another one.
_OTHER_ORDERS: Final = 2.0
# Share of the limit of ``bias`` that is left to the elements that are not off. The ones that were shifted the most have
# been taken from them as off, so of one wrong factor in all elements less is seen in the rest.
_BIAS_OF_REST: Final = 0.5
# Larger values, such as masks of -1e9, excuse no more than this one.
_TALL = 16.0


def limits_without_draws(limits: Limits) -> Limits:
    """What passes by eager's own error alone: about what a draw of half its size would let pass.

    The noise of an element is the root of the mean square of eager's error and of the usual one. With a draw that is a
    third number in the mean, which keeps two thirds of the square at least, if the usual one stays. Of the mean of four
    projections, two of which are the usual ones, three quarters are kept then. With a draw as large as eager's error
    nothing is lost; with one of nothing, which is rare, half of the squares and more.
    """
    return replace(limits, rms=limits.rms * (2 / 3) ** 0.5, bias=limits.bias * (3 / 4) ** 0.5,
                   peak=limits.peak * (2 / 3) ** 0.5)


def new_leaf(name: str, kind: str, eager: torch.Tensor) -> Leaf:
    """The leaf of a tensor that is not measured yet."""
    return Leaf(name, kind, numel=eager.numel(), dtype=str(eager.dtype).removeprefix("torch."))


def judge_values(name: str, kind: str, eager: Any, compiled: Any, reference: Reference, limits: Limits) -> Leaf:
    """Measure tensors, or numbers of Python, that are not bitwise equal."""
    if isinstance(eager, (float, complex)):
        dtype = torch.float64 if isinstance(eager, float) else torch.complex128
        eager, compiled = torch.tensor(eager, dtype=dtype), torch.tensor(compiled, dtype=dtype)
    eager, compiled = small_to_cpu(eager), small_to_cpu(compiled)
    leaf, compiled = new_leaf(name, kind, eager), compiled.to(eager.dtype)
    if eager.is_floating_point() or eager.is_complex():
        return judge_numbers(leaf, eager, compiled, reference, limits)
    return _judge_discrete(leaf, eager, compiled, reference)


def judge_numbers(
    leaf: Leaf, eager: torch.Tensor, compiled: torch.Tensor, reference: Reference, limits: Limits
) -> Leaf:
    """Measure a floating or complex leaf that is not bitwise equal."""
    e, c = as_real(eager.detach()), as_real(compiled.detach())
    dtype = e.dtype
    e, c = computable(e), computable(c)
    estimate = reference.estimates.get(leaf.name)
    if estimate is None or not estimate.continuous or estimate.value.shape != e.shape:
        why = reference.why or "the float64 run has nothing of this name and shape"
        leaf = replace(leaf, against="eager-only", why=why)
        return _measure_error(leaf, e, c, scale_from_dtype(e, dtype, None, reference.unit), limits)
    leaf = replace(leaf, against=reference.kind, why=reference.why)
    if not estimate.offered and reference.kind in WIDER:
        return _measure_error(leaf, e, c, scale_from_eager(e, dtype, estimate), limits, estimate)
    if not estimate.draws:
        return _measure_error(leaf, e, c, scale_from_dtype(e, dtype, estimate, reference.unit), limits)
    if reference.kind == "eager-draws":
        return _without_wide(leaf, e, c, estimate, reference, limits)
    scale = scale_from_draws(e, dtype, estimate, with_eager=True)
    mine, *others = scale.noise.mean_squares
    usual = max(sum(others) / len(others), 1.0)
    is_unfit = mine > _UNFIT**2 * usual
    if is_unfit:
        # Eager itself is far from the reference. If its error counted as noise anything would pass.
        scale = scale_from_draws(e, dtype, estimate, with_eager=False)
    from_reference = _measure_error(leaf, e, c, scale, limits, estimate)
    if mine <= ASIDE**2 * usual or problem(from_reference, limits) is None:
        return from_reference
    # Where eager is off by more than noise, so may compiled code be: it has to be near one of the two.
    alone = scale_from_draws(e, dtype, estimate, with_eager=False)
    around_eager = replace(alone, centre=e, eager=e)
    from_eager = _measure_error(replace(leaf, against="eager"), e, c, around_eager, limits, estimate)
    if is_unfit or problem(from_eager, limits) is None:
        return from_eager
    return from_reference


def _without_wide(
    leaf: Leaf, e: torch.Tensor, c: torch.Tensor, estimate: Estimate, reference: Reference, limits: Limits
) -> Leaf:
    """Measure from eager itself: by what disturbed inputs do to it, or by a scale from the dtype where that is wider.

    Neither bounds all rounding: disturbed inputs know how ill-conditioned the program is, the dtype how it accumulates.
    """
    by_draws = _measure_error(leaf, e, c, scale_from_draws(e, e.dtype, estimate, with_eager=False), limits, estimate)
    if problem(by_draws, limits) is None:
        return by_draws
    by_dtype = _measure_error(leaf, e, c, scale_from_dtype(e, e.dtype, None, reference.unit), limits)
    if problem(by_dtype, limits) is None:
        return by_dtype
    return by_draws


def judge_beside_orders(
    leaf: Leaf, eager: torch.Tensor, compiled: torch.Tensor, reference: Reference, limits: Limits
) -> Leaf:
    """Judge a leaf that noise does not clear once more: without the errors that other orders of summation make.

    Each element is moved towards the expected value by up to twice what some order was off there; what is left has to
    hold the same limits. The same leaf where no sum has terms that repeat, or where they do not explain it.
    """
    orders = reference.other_orders(leaf.name)
    if orders is None or orders.reach is None or orders.value.shape != compiled.shape:
        return leaf
    found = small_to_cpu(compiled.detach()).double()
    error = found - orders.value
    explained = _OTHER_ORDERS * orders.reach.view(error.shape).double()
    nearer = found - torch.minimum(error.abs(), explained).copysign(error).where(error.isfinite(), 0.0)
    unmeasured = Leaf(leaf.name, leaf.kind, numel=leaf.numel, dtype=leaf.dtype)
    rest = judge_numbers(unmeasured, small_to_cpu(eager), nearer.to(compiled.dtype), reference, limits)
    if problem(rest, limits) is not None:
        return leaf
    text = (f"eager {leaf.eager:.9g}, compiled {leaf.compiled:.9g}, expected {leaf.expected:.9g}: excused, since terms "
            f"of a sum repeat, and eager is off by {float(orders.reach.amax()):.2g} in another order of summation; "
            "inputs drawn at random would be judged by rounding noise alone")
    return replace(rest, index=leaf.index, eager=leaf.eager, compiled=leaf.compiled, expected=leaf.expected,
                   excused=text)


def excused_difference(eager: torch.Tensor, compiled: torch.Tensor, eps: float, why: str) -> Measurement[str]:
    """Tell the largest difference of a leaf that passes, if it is far more than a rounding of the value; else ''.

    Noise excuses it rightly where rounding decides about a jump, as of floor or of a comparison. Whoever reads 9 for 10
    has to be told so. ``eps`` is that of the narrowest dtype around: a loss in float32 of a half precision model is no
    more exact than the model. Values below the leaf's mean size count as that: near zero any relative error is large.
    ``why``: the reason that is told.
    """
    e, c = as_real(eager.detach()), as_real(compiled.detach())
    share = eps**0.5
    farthest, typical = (yield _largest_difference(e, c)).tolist()
    # Nearly all leaves end here.
    if farthest <= share * typical:
        return ""
    is_far, count, flat, one, other = (yield _far_differences(e, c, share, typical)).tolist()
    if not is_far:
        return ""
    place = ""
    if e.ndim:
        place = f" at {list(index_of(int(flat), e.shape))}"
    return (f"eager {one:.9g}, compiled {other:.9g}{place}: excused, since {why}; "
            f"{int(count)} of {e.numel()} elements are as far apart")


def _largest_difference(eager: torch.Tensor, compiled: torch.Tensor) -> torch.Tensor:
    """The largest difference and eager's mean size; of what is finite, as all else is judged elsewhere."""
    e, c = computable(eager), computable(compiled)
    apart = (e - c).abs_().nan_to_num_(0.0, 0.0, 0.0).amax()
    size = e.abs().nan_to_num_(0.0, 0.0, 0.0).mean(dtype=torch.float32)
    return torch.stack([apart.double(), size.double()])


def _far_differences(eager: torch.Tensor, compiled: torch.Tensor, share: float, typical: float) -> torch.Tensor:
    """Whether elements differ by more than a share of their size, how many, the place of the farthest, its values."""
    e, c = computable(eager), computable(compiled)
    apart = (e - c).abs_()
    far = apart > share * torch.maximum(e.abs(), c.abs()).clamp_(min=typical)
    flat = apart.masked_fill_(~far, 0.0).argmax()
    there = [side.reshape(-1).index_select(0, flat.view(1)).squeeze(0) for side in (e, c)]
    return torch.stack([number.double() for number in (far.any(), far.sum(), flat, *there)])


def _judge_discrete(leaf: Leaf, eager: torch.Tensor, compiled: torch.Tensor, reference: Reference) -> Leaf:
    """Judge integers and booleans: equal, except where rounding alone flips an element.

    Not more of them may differ than several draws together have flipped, or eager has.
    """
    differ = (eager != compiled).flatten()
    loose = torch.zeros_like(differ)
    expected = eager
    estimate = reference.estimates.get(leaf.name)
    usual = 0
    has_shape = estimate is not None and isinstance(estimate.value, torch.Tensor)
    if estimate is not None and has_shape and estimate.value.shape == eager.shape:
        expected = estimate.value
        loose |= (eager != expected).flatten()
        usual = max([int(loose.sum()), *estimate.flipped])
        if estimate.flips is not None:
            loose |= estimate.flips.flatten()
        leaf = replace(leaf, against=reference.kind, draws=estimate.draws + 1)
    hard = differ & ~loose
    wrong, excused = int(hard.sum()), int((differ & loose).sum())
    shown = hard if wrong else differ
    leaf = with_values(leaf, int(shown.nonzero()[0]), eager, compiled, expected)
    leaf = replace(leaf, undecidable=excused, blind=int(loose.sum()), wrong=wrong / leaf.numel)
    if wrong:
        text = f"{wrong} of {leaf.numel} elements differ although rounding can't flip them"
        return replace(leaf, message=text)
    # eager and compiled differ where either has flipped: twice the usual number, and a little for luck
    likely = 2 * usual + 4 * (2 * usual) ** 0.5 + 4
    if excused > likely:
        text = f"{excused} of {leaf.numel} elements differ, where rounding flips {usual} at a time"
        return replace(leaf, message=text)
    return leaf


def _measure_error(
    leaf: Leaf, e: torch.Tensor, c: torch.Tensor, scale: Scale, limits: Limits, estimate: Estimate | None = None
) -> Leaf:
    """Fill in the error of ``c`` from the centre of the scale; memory stays that of one piece."""
    brink = None
    if estimate is not None:
        brink = estimate.brink
    leaf = _compare_not_finite(replace(leaf, draws=scale.draws), e, c, scale.centre, brink)
    if leaf.message:
        return leaf
    tally = ErrorTally(limits, Projections(scale.weights), _largest_value(scale), scale.levels.typical)
    for part, (compiled, eager) in split_leaf(scale, c, e):
        tally.add(part, compiled, eager)
    shown = tally.worst if tally.first_beyond is None else tally.first_beyond
    leaf = with_values(leaf, shown, e, c, scale.centre)
    count = tally.elements_seen
    # Of elements that are not finite some are blind already.
    blind = min(count, leaf.blind + tally.blind)
    if tally.zeros_would_pass():
        blind = count
    floor = BIAS_FLOOR / limits.bias if limits.bias else 0.0
    bias = scale.noise.excess(tally.systematic, floor)
    grain = grain_off = beside_own = None
    if blind == count and tally.own_farthest:
        beside_own = tally.farthest / tally.own_farthest
    # Where most elements that are off are lost, being small beside the largest value is no excuse.
    if tally.lost <= tally.wrong - tally.lost:
        grain = grain_of(tally.farthest, tally.largest, scale.dtype)
        # Elements that are off shift the leaf as well. The others must not.
        _, most_bias, _ = limits.of(count)
        if bias <= most_bias or _bias_of_near(e, c, scale, floor) <= _BIAS_OF_REST * most_bias:
            grain_off = grain_of(tally.farthest_off, tally.largest, scale.dtype)
    return replace(leaf, rms=(tally.error_squares / count) ** 0.5, bias=bias, peak=tally.peak, grain=grain,
                   grain_off=grain_off, wrong=tally.wrong / count, blind=blind, beside_own=beside_own,
                   drowned=tally.zeros_would_pass(_quieter_in_the_end(scale.draws)))


def _quieter_in_the_end(draws: int) -> float:
    """How many times less noise an element has, if all draws that an undecided leaf gets after so many show none.

    The mean of its squares falls, with the usual one in it, and so does the usual one. That one is known to a factor of
    two only, so a leaf that is told to be drowned may have been decided in the end, by a hair. Eager's own error is one
    of the draws. Infinite where nothing was drawn.
    """
    if not draws:
        return inf
    most = max(FEW + 1, draws)
    return sqrt(most * (most + 1) / (draws * (draws + 1)))


def _bias_of_near(e: torch.Tensor, c: torch.Tensor, scale: Scale, floor: float) -> float:
    """The systematic offset of the elements that are not off, over the noise's."""
    systematic = Projections(scale.weights)
    for part, (compiled, eager) in split_leaf(scale, c, e):
        error = part.error_of(compiled, eager)
        near = ~part.jumps & (error.abs() / part.noise <= OFF)
        systematic.add(error.where(near, 0.0), part.exact)
    return scale.noise.excess(systematic, floor)


def _largest_value(scale: Scale) -> float:
    """Of a leaf, infinities aside."""
    largest = 0.0
    for (value,) in split_pieces(scale.centre):
        largest = max(largest, float(finite_values(value.double()).abs().amax()))
    return largest


def grain_of(farthest: float, largest: float, dtype: torch.dtype) -> float | None:
    """Of a leaf that is not mostly lost, see ``Leaf.grain``; None for a leaf of zeros."""
    step = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) * min(largest, _TALL)
    if not step:
        return None
    return farthest / step


def _compare_not_finite(
    leaf: Leaf, e: torch.Tensor, c: torch.Tensor, exact: torch.Tensor, brink: torch.Tensor | None
) -> Leaf:
    """Look at NaN and infinity: a message where they differ, a count where rounding or overflow decides.

    Nothing can be said of elements where eager has none, or other ones, while the float64 value is
    finite: eager overflowed on its way. Nor of those that some draw takes to the end of the dtype's range.
    """
    excused = start = wrong = 0
    first = None
    edges = brink
    if edges is None:
        edges = torch.zeros((), dtype=torch.bool, device=c.device).expand(c.numel())
    for eager, compiled, truth, edge in split_pieces(e, c, exact, edges):
        bad = ~(torch.isfinite(eager) & torch.isfinite(compiled))
        if bool(bad.any()):
            differ = bad & (eager != compiled) & ~(eager.isnan() & compiled.isnan())
            excuse = edge | (~torch.isfinite(eager) & torch.isfinite(truth))
            excused += int((differ & excuse).sum())
            hard = differ & ~excuse
            wrong += int(hard.sum())
            if first is None and bool(hard.any()):
                first = start + int(hard.nonzero()[0])
        start += compiled.numel()
    leaf = replace(leaf, undecidable=excused, blind=excused)
    if first is None:
        return leaf
    text = f"{wrong} of {c.numel()} elements are NaN or infinite in eager or compiled alone"
    return replace(with_values(leaf, first, e, c, exact), wrong=wrong / c.numel(), message=text)


def with_values(leaf: Leaf, flat: int, e: torch.Tensor, c: torch.Tensor, expected: torch.Tensor) -> Leaf:
    """The leaf with the values at a place that is counted over all elements."""
    index = index_of(flat, e.shape)
    values = [tensor[index] for tensor in (e, c, expected)]
    if all(value.is_floating_point() for value in values):
        eager, compiled, truth = read_numbers(*values)
    else:
        eager, compiled, truth = (value.item() for value in values)
    return replace(leaf, index=index, eager=eager, compiled=compiled, expected=truth)


def index_of(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of an element by its place, which is counted over all."""
    index: tuple[int, ...] = ()
    for size in reversed(shape):
        index = (flat % size, *index)
        flat //= size
    return index
