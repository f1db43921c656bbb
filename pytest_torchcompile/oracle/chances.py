"""Chances: random operators that draw other numbers compiled than eagerly. Their distributions are compared.

Without ``torch._inductor.config.fallback_random`` Inductor draws its own random numbers, so no value can be compared
with eager's. What stays the same over many seeds is the share of zeros (what dropout keeps), the mean and the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle.estimate import as_real, finite
from pytest_torchcompile.oracle.leaf import Leaf
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.state.snapshot import StateSnapshot

__all__ = ["Chances", "chances", "compare_chances"]

_LIMIT = 6.0
"""Standard errors by which two correct means may differ: once in 500 million, and there are a dozen for each leaf."""
_ORDER = 2.0**-12
"""By how much of its largest element a leaf may move when it is computed again from the same random numbers."""
_MEASURES = ("share of zeros", "mean", "scale", "projection")


@dataclass
class Chances:
    """What the values of some calls with different seeds have in common."""

    samples: dict[str, list[list[float]]] = field(default_factory=dict)
    """By leaf and call: its share of zeros, mean, root mean square and a projection on fixed signs."""
    discrete: set[str] = field(default_factory=set)
    """Leaves of whole numbers or booleans."""
    repeats: bool = True
    """Whether the first seed gave the same values again."""
    varies: bool = False
    """Whether other seeds gave other values."""
    error: str = ""
    """What a call raised."""


def chances(
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
    start, found = StateSnapshot(module), Chances()
    beginning: Recording | None = None
    for number in (*range(seeds), 0):
        seen = record(call, module, batch, loss=loss, train=train, seed=first + number)
        start.restore()
        if seen.error is not None:
            found.error = str(seen.error)
            return found
        if beginning is None:
            beginning = seen
        elif number == 0:
            found.repeats = _alike(beginning, seen)
            return found
        else:
            found.varies = found.varies or not _alike(beginning, seen)
        for name, value in _numbers(seen):
            found.samples.setdefault(name, []).append(_measures(value))
            if not (value.is_floating_point() or value.is_complex()):
                found.discrete.add(name)
    return found


def compare_chances(eager: Chances, compiled: Chances) -> list[Leaf]:
    """One leaf of kind ``rng`` for every measure of every leaf, and one for the seeds.

    ``peak`` is the difference of the two means in standard errors (Welch); where eager does not vary at all, compiled
    may be off by a thousandth. Of whole numbers that eager does not draw it is only asked whether they vary: a tie that
    rounding decides may fall to the other side.
    """
    if eager.error or compiled.error:
        same = bool(eager.error) == bool(compiled.error)
        text = "" if same else f"eager {eager.error or 'ran'}, compiled {compiled.error or 'ran'}"
        return [Leaf("error", "error", bitwise=same, message=text)]
    leaves = [_seeds(eager, compiled)]
    for name, samples in eager.samples.items():
        others = compiled.samples.get(name, [])
        if name in eager.discrete and others and not _vary(samples):
            text = "varies with the seed, compiled only" if _vary(others) else ""
            leaves.append(Leaf(name, "rng", len(others), bitwise=not text, message=text))
            continue
        for i, measure in enumerate(_MEASURES):
            mine, found = [sample[i] for sample in samples], [sample[i] for sample in others]
            leaves.append(_measured(f"{measure} of {name}", mine, found))
    return leaves


def _seeds(eager: Chances, compiled: Chances) -> Leaf:
    text = ""
    if eager.repeats and not compiled.repeats:
        text = "the same seed gives other values when it is used again, compiled only"
    elif eager.varies and not compiled.varies:
        text = "eager draws other numbers for another seed, compiled always the same"
    elif compiled.varies and not eager.varies:
        text = "compiled values depend on the seed, eager ones don't"
    return Leaf("seeds", "rng", bitwise=not text, message=text)


def _measured(name: str, mine: list[float], found: list[float]) -> Leaf:
    if not found:
        return Leaf(name, "rng", message="only eager has it")
    (a, spread), (b, other) = _mean(mine), _mean(found)
    # one rounding in half precision moves a mean by less
    error = math.sqrt(spread + other) + 1e-3 * abs(a) / _LIMIT
    distance = abs(a - b) / error if error > 0 else 0.0 if a == b else math.inf
    text = ""
    if not distance <= _LIMIT:
        text = f"is {a:.6g} eagerly, {b:.6g} compiled over {len(found)} seeds, {distance:.3g} standard errors apart"
    return Leaf(name, "rng", len(found), bitwise=not text, peak=distance, eager=a, compiled=b, message=text)


def _vary(samples: list[list[float]]) -> bool:
    return any(sample != samples[0] for sample in samples)


def _mean(values: list[float]) -> tuple[float, float]:
    """Mean, and the squared standard error of it."""
    mean = sum(values) / len(values)
    return mean, sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1) / len(values)


def _measures(value: torch.Tensor) -> list[float]:
    flat = finite(as_real(value).double()).reshape(-1)
    signs = torch.arange(flat.numel(), device=flat.device).mul_(40503).bitwise_right_shift_(4).bitwise_and_(1)
    return [
        float((flat == 0).double().mean()),
        float(flat.mean()),
        float(flat.square().mean().sqrt()),
        float((flat * (1 - 2 * signs)).mean()),
    ]


def _numbers(seen: Recording) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole ones too: a sampler returns nothing else."""
    for name, _, value in seen.values():
        if isinstance(value, torch.Tensor) and value.numel():
            yield name, value


def _alike(one: Recording, other: Recording) -> bool:
    again = dict(_numbers(other))
    return all(name in again and _same_draws(value, again[name]) for name, value in _numbers(one))


def _same_draws(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two values differ by no more than sums in another order do: atomics do not repeat bit by bit."""
    if not (one.is_floating_point() or one.is_complex()) or one.shape != other.shape:
        return torch.equal(one, other)
    one, other = finite(as_real(one).double()), finite(as_real(other).double())
    return bool((one - other).abs().amax() <= _ORDER * one.abs().amax())
