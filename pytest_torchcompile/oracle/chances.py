"""Chances: random operators that draw other numbers compiled than eagerly. Their distributions are compared.

Without ``torch._inductor.config.fallback_random`` Inductor draws its own random numbers, so no value can be compared
with eager's. What stays the same over many seeds is the share of zeros (what dropout keeps), the mean and the scale;
how neighbours go together; and how far all of these vary from seed to seed. Elements that share one random number have
the right mean, and vary too much.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle.estimate import as_real, finite_values
from pytest_torchcompile.oracle.leaf_limits import Leaf
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.state.snapshot import StateSnapshot

__all__ = ["Chances", "Moments", "compare_chances", "is_rounding", "sample_chances", "variance_distance", "welch"]

# Standard errors by which two correct means may differ: once in 500 million, and there are a dozen for each leaf.
_LIMIT = 6.0
# By how much of its largest element a leaf may move when it is computed again from the same random numbers.
_ORDER = 2.0**-12
_EPS = torch.finfo(torch.float32).eps
# Relative; one rounding in half precision moves a mean by less.
_SLACK = 1e-3
_MEASURES = ("share of zeros", "mean", "scale", "projection", "zeros side by side", "zeros one above the other")
_IN_UNITS_OF_SCALE = ("mean", "projection")
_SCALE = _MEASURES.index("scale")
# Relative to a leaf's scale: what varies by less than that is computed without a draw, up to the order of its sums.
_STEADY = 1e-6
# With fewer seeds nothing is said of how far a measure varies.
_SEEDS_FOR_SPREAD = 32


@dataclass
class Moments:
    """Mean of a value over several runs, and the squared deviations from it, summed over runs and elements."""

    mean: torch.Tensor
    count: int = 1
    squares: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Moments:
        """Those of numbers that are all there."""
        mean = sum(values) / len(values)
        squares = sum((value - mean) ** 2 for value in values)
        return cls(torch.tensor(mean, dtype=torch.float64), len(values), squares)

    def add(self, value: torch.Tensor) -> None:
        """Take one more run in (Welford, Technometrics 4, 1962)."""
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self.squares += float((step * (value - self.mean)).sum())

    @property
    def squared_error(self) -> float:
        """The squared standard error of the mean, summed over the elements."""
        return self.squares / max(1, self.count - 1) / self.count


def is_rounding(scale: float, largest: float) -> bool:
    """Whether a leaf's root mean square is below one eps of float32 of the largest of its kind.

    So is the gradient of a bias in front of a softmax or of a batch norm, which is zero in exact arithmetic. Rounding
    noise has no distribution that two correct programs share.
    """
    return scale <= _EPS * largest


def welch(one: Moments, other: Moments, slack: float = 0.0) -> float:
    """How many standard errors two means are apart (Welch, Biometrika 34, 1947); of several elements, as vectors.

    ``slack`` is added to the standard error. Equal means are 0 apart; unequal ones that nothing varies are infinitely.
    """
    apart = math.sqrt(float((one.mean - other.mean).square().sum()))
    error = math.sqrt(one.squared_error + other.squared_error) + slack
    if error > 0:
        return apart / error
    return math.inf if apart else 0.0


@dataclass
class Chances:
    """What the values of some calls with different seeds have in common."""

    samples: dict[str, list[list[float]]] = field(default_factory=dict)
    """By leaf and call: what :func:`_measure` makes of it."""
    discrete: set[str] = field(default_factory=set)
    """Leaves of whole numbers or booleans."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Kind of each leaf, as ``Recording.values`` gives it."""
    repeats: bool = True
    """Whether the first seed gave the same values again."""
    varies: bool = False
    """Whether other seeds gave other values."""
    error: str = ""
    """What a call raised."""

    @property
    def names_that_vary(self) -> frozenset[str]:
        """Leaves that were not the same for every seed."""
        return frozenset(name for name, samples in self.samples.items() if _vary(samples))

    def scale_of(self, name: str) -> float:
        """The mean over the calls of a leaf's root mean square; 0 where it is not there."""
        samples = self.samples.get(name)
        return statistics.fmean(sample[_SCALE] for sample in samples) if samples else 0.0

    def largest_scales(self) -> dict[str, float]:
        """By kind, the largest root mean square that any leaf had in any call."""
        largest: dict[str, float] = {}
        for name, samples in self.samples.items():
            kind = self.kinds.get(name, "")
            largest[kind] = max(largest.get(kind, 0.0), *(sample[_SCALE] for sample in samples))
        return largest

    def add_call(self, recording: Recording) -> None:
        """Take one call in."""
        for name, kind, value in _tensors_in(recording):
            self.samples.setdefault(name, []).append(_measure(value))
            self.kinds[name] = kind
            if not (value.is_floating_point() or value.is_complex()):
                self.discrete.add(name)


def sample_chances(
    call: Callable[..., Any],
    module: torch.nn.Module | None,
    batch: Batch,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    train: bool = True,
    seeds: int = 64,
    first: int = 0,
) -> Chances:
    """Run ``call`` with ``seeds`` different seeds from one state, and once more with the first seed.

    Arguments as for ``record``; the module is left in the state in which it was.
    """
    start, chances = StateSnapshot(module), Chances()
    beginning: Recording | None = None
    for number in (*range(seeds), 0):
        recording = record(call, module, batch, loss=loss, train=train, seed=first + number)
        start.restore()
        if recording.error is not None:
            chances.error = str(recording.error)
            break
        if beginning is None:
            beginning = recording
        elif number == 0:
            # The first seed once more, after all others.
            chances.repeats = _same_draws(beginning, recording)
            break
        else:
            chances.varies = chances.varies or not _same_draws(beginning, recording)
        chances.add_call(recording)
    return chances


def compare_chances(eager: Chances, compiled: Chances) -> list[Leaf]:
    """One leaf of kind ``rng`` for every measure of every leaf, and one for the seeds.

    ``peak`` is the difference of the two means in standard errors (Welch), or of the logarithms of the two variances
    (Layard), where these are further apart; where eager does not vary at all, compiled
    may be off by a thousandth. Of whole numbers that eager does not draw it is only asked whether they vary: a tie that
    rounding decides may fall to the other side.
    """
    if eager.error or compiled.error:
        text = ""
        if not (eager.error and compiled.error):
            text = f"eager {eager.error or 'ran'}, compiled {compiled.error or 'ran'}"
        return [Leaf("error", "error", bitwise=not text, message=text)]
    leaves = [_compare_seeds(eager, compiled)]
    largest, other_largest = eager.largest_scales(), compiled.largest_scales()
    for name, samples in eager.samples.items():
        others = compiled.samples.get(name, [])
        kind = eager.kinds.get(name, "")
        rounds = is_rounding(eager.scale_of(name), largest[kind])
        if others and rounds and is_rounding(compiled.scale_of(name), other_largest.get(kind, 0.0)):
            continue
        if name in eager.discrete and others and not _vary(samples):
            text = "varies with the seed, compiled only" if _vary(others) else ""
            leaves.append(Leaf(name, "rng", len(others), bitwise=not text, message=text))
        else:
            leaves += _compare_measures(name, samples, others)
    return leaves


def _compare_measures(name: str, eager: list[list[float]], compiled: list[list[float]]) -> Iterator[Leaf]:
    """A leaf of each measure. Both have a list for each seed, with the measures in their order."""
    for place, measure in enumerate(_MEASURES):
        mine = [sample[place] for sample in eager]
        theirs = [sample[place] for sample in compiled]
        unit = other_unit = 0.0
        if measure in _IN_UNITS_OF_SCALE and compiled:
            unit = _unit_of_steady(mine, max(sample[_SCALE] for sample in eager))
            other_unit = _unit_of_steady(theirs, max(sample[_SCALE] for sample in compiled))
        leaf = _compare_means(f"{measure} of {name}", mine, theirs, unit)
        # Where no draw reaches the measure on either side, it varies by rounding, and as the order of sums has it.
        only_rounding = unit > 0 and other_unit > 0
        # Where the means are apart already, the variances need not be asked.
        if not leaf.message and not only_rounding:
            leaf = _compare_spreads(leaf, mine, theirs)
        yield leaf


def _compare_seeds(eager: Chances, compiled: Chances) -> Leaf:
    text = ""
    if eager.repeats and not compiled.repeats:
        text = "the same seed gives other values when it is used again, compiled only"
    elif eager.varies and not compiled.varies:
        text = "eager draws other numbers for another seed, compiled always the same"
    elif compiled.varies and not eager.varies:
        text = "compiled values depend on the seed, eager ones don't"
    return Leaf("seeds", "rng", bitwise=not text, message=text)


def _unit_of_steady(values: list[float], scale: float) -> float:
    """The scale of a leaf that no draw reaches, else 0: the mean of a normalised output is 0 up to rounding."""
    if max(values) - min(values) <= _STEADY * scale:
        return scale
    return 0.0


def _compare_means(name: str, eager: list[float], compiled: list[float], unit: float = 0.0) -> Leaf:
    """Means may be a thousandth apart: of eager's mean, or of ``unit`` where that is larger."""
    if not compiled:
        return Leaf(name, "rng", message="only eager has it")
    mine, theirs = Moments.of(eager), Moments.of(compiled)
    mean, other = float(mine.mean), float(theirs.mean)
    distance = welch(mine, theirs, slack=_SLACK * max(abs(mean), unit) / _LIMIT)
    text = ""
    # not (a > b), so that NaN is a problem
    if not distance <= _LIMIT:
        text = (f"is {mean:.6g} eagerly, {other:.6g} compiled over {len(compiled)} seeds, "
                f"{distance:.3g} standard errors apart")
    return Leaf(name, "rng", len(compiled), bitwise=not text, peak=distance, eager=mean, compiled=other, message=text)


def _compare_spreads(leaf: Leaf, eager: list[float], compiled: list[float]) -> Leaf:
    """The leaf of a measure whose means agree, with how far it varies over the seeds compared too."""
    if min(len(eager), len(compiled)) < _SEEDS_FOR_SPREAD:
        return leaf
    distance = variance_distance(eager, compiled)
    # Like _compare_means: NaN is a problem.
    if distance <= _LIMIT:
        return leaf
    one, other = (statistics.stdev(values) for values in (eager, compiled))
    text = (f"varies over {len(compiled)} seeds by {one:.3g} eagerly, by {other:.3g} compiled, {distance:.3g} standard "
            "errors apart: do elements share random numbers?")
    return replace(leaf, bitwise=False, peak=distance, message=text)


def variance_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """How many standard errors the logarithms of two variances are apart (Layard, JASA 68, 1973).

    How far the variance of a sample is off depends on the kurtosis, which both samples estimate. What varies by less
    than a rounding of its size counts as that. The middle thirds of the samples must be at least half as far apart:
    events that are seen a few times in a hundred seeds make large variances by chance, and leave these as they are.
    """
    size = _ORDER * max(map(abs, [*one, *other]))
    if not size:
        return 0.0
    variances, kurtoses, middles = [], [], []
    for values in (one, other):
        mean = statistics.fmean(values)
        squares = [(value - mean) ** 2 for value in values]
        variance = statistics.fmean(squares) + size**2
        variances.append(variance)
        kurtoses.append(statistics.fmean(square**2 for square in squares) / variance**2)
        low, high = statistics.quantiles(values, n=3)
        middles.append((high - low) ** 2 + size**2)
    # A small sample shows too little of a heavy tail: never less than of a normal distribution.
    kurtosis = max(3.0, *kurtoses)
    error = math.sqrt((kurtosis - 1) * (1 / (len(one) - 1) + 1 / (len(other) - 1)))
    apart, middles_apart = (abs(math.log(first / second)) for first, second in (variances, middles))
    if 2 * middles_apart < apart:
        return 0.0
    return apart / error


def _vary(samples: list[list[float]]) -> bool:
    return any(sample != samples[0] for sample in samples)


def _measure(value: torch.Tensor) -> list[float]:
    """In the order of ``_MEASURES``."""
    flat = finite_values(as_real(value).double()).reshape(-1)
    zero = flat == 0
    row = max(1, value.shape[-1]) if value.ndim else 1
    signs = torch.arange(flat.numel(), device=flat.device).mul_(40503).bitwise_right_shift_(4).bitwise_and_(1)
    return [
        float(zero.double().mean()),
        float(flat.mean()),
        float(flat.square().mean().sqrt()),
        float((flat * (1 - 2 * signs)).mean()),
        _share_of_equals(zero, 1),
        _share_of_equals(zero, row),
    ]


def _share_of_equals(flags: torch.Tensor, apart: int) -> float:
    """The share of elements that are what the one ``apart`` places before is; 1 where there is none."""
    if flags.numel() <= apart:
        return 1.0
    return float((flags[apart:] == flags[:-apart]).double().mean())


def _tensors_in(recording: Recording) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Name, kind and value; whole numbers too: a sampler returns nothing else."""
    for name, kind, value in recording.values():
        if isinstance(value, torch.Tensor) and value.numel():
            yield name, kind, value


def _same_draws(one: Recording, other: Recording) -> bool:
    again = {name: value for name, _, value in _tensors_in(other)}
    return all(name in again and _same_but_for_order(value, again[name]) for name, _, value in _tensors_in(one))


def _same_but_for_order(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two values differ by no more than sums in another order do: atomics do not repeat bit by bit."""
    if not (one.is_floating_point() or one.is_complex()) or one.shape != other.shape:
        return torch.equal(one, other)
    one, other = finite_values(as_real(one).double()), finite_values(as_real(other).double())
    return bool((one - other).abs().amax() <= _ORDER * one.abs().amax())
