"""Models that draw random numbers: eager and compiled runs compared by their means over many draws.

Inductor draws other random numbers than eager does (unless ``torch._inductor.config.fallback_random`` is set), so
that two runs of a model with dropout never agree element by element. Their means do. For each leaf, with m runs of
each kind and different seeds,

    ratio = |mean(eager) - mean(compiled)|^2 / (2/m * (var(eager) + var(compiled)) / 2)

where squares are summed over the elements. It is 1 on average where both draw from one distribution; for a leaf of one
element it is the square of Welch's t. Nothing is assumed of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import torch

from pytest_torchcompile.oracle import Recording

__all__ = ["FIRST", "SECOND", "Means", "compare_means", "drew"]

FIRST: Final = (12, 6.0)
"""Runs of each kind, and the ratio from which a leaf is suspected (a correct leaf of one element: about 2 in 100)."""
SECOND: Final = (48, 16.0)
"""Fresh runs that a suspicion buys, and the ratio from which it is a verdict (about 1 in 10 000)."""


@dataclass(frozen=True)
class Means:
    """What the means say."""

    random: frozenset[str]
    """Leaves that differ between two eager runs: only of these can the means speak."""
    apart: dict[str, str]
    """Of these, the ones whose means differ by more than chance, each with a line that says so."""
    runs: int = 0
    """How many of each kind were made."""
    error: str = ""
    """The first run that raised."""


def drew(seen: Recording, seed: int) -> bool:
    """Whether a recorded run that began with ``seed`` has drawn from any of torch's random generators."""
    return any(not torch.equal(torch.Generator(device).manual_seed(seed).get_state(), state)
               for device, state in seen.generators.items())


def compare_means(
    eager: Callable[[int], Recording], compiled: Callable[[int], Recording], agreed: Callable[[bool], bool] = bool
) -> Means:
    """Compare many runs ``eager(seed)`` with as many ``compiled(seed)``, each from one and the same state.

    ``agreed`` makes one answer of those of all ranks; it is asked in the same places on each.
    """
    random: frozenset[str] = frozenset()
    apart: dict[str, str] = {}
    only: Collection[str] | None = None
    start = 1
    for runs, limit in (FIRST, SECOND):
        mine: dict[str, _Moments] = {}
        found: dict[str, _Moments] = {}
        for seed in range(start, start + runs):
            # Seeds of its own for each: a backend that draws as eager does must not look more alike than chance has it.
            for into, seen in ((mine, eager(2 * seed)), (found, compiled(2 * seed + 1))):
                error = seen.error or _refused(into, seen, only)
                if agreed(error is not None):
                    return Means(random, {}, start, str(error or "it raises on another rank"))
        random |= {name for name, moments in mine.items() if moments.squares > 0}
        apart = {name: line for name in random & mine.keys()
                 if (line := _differs(name, mine[name], found.get(name), limit))}
        start += runs
        if not agreed(bool(apart)):
            break
        only = apart
    return Means(random, apart, start - 1)


def _refused(into: dict[str, _Moments], seen: Recording, only: Collection[str] | None) -> Exception | None:
    """Add a run, and return what that raises: other ranks are told as they are of a run that raises."""
    try:
        _add(into, seen, only)
    except Exception as error:
        return error
    return None


@dataclass
class _Moments:
    """Mean of a leaf and summed squared deviation from it, run by run (Welford, Technometrics 4, 1962)."""

    mean: torch.Tensor
    count: int = 1
    squares: float = 0.0

    def add(self, value: torch.Tensor) -> None:
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self.squares += float((step * (value - self.mean)).sum())


def _add(into: dict[str, _Moments], seen: Recording, only: Collection[str] | None) -> None:
    for name, _, value in seen.values():
        if isinstance(value, torch.Tensor) and (only is None or name in only):
            number = value.to_dense() if value.layout is not torch.strided else value
            number = torch.view_as_real(number.resolve_conj()) if number.is_complex() else number
            number = number.to(torch.float32 if number.device.type == "mps" else torch.float64)
            number = number.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            if name not in into:
                into[name] = _Moments(number.clone())
            elif into[name].mean.shape == number.shape:
                into[name].add(number)


def _differs(name: str, eager: _Moments, compiled: _Moments | None, limit: float) -> str:
    if compiled is None or compiled.mean.shape != eager.mean.shape:
        return f"{name}: only eager has it" if compiled is None else f"{name}: its shape differs"
    runs = min(eager.count, compiled.count)
    apart = float((eager.mean - compiled.mean).square().sum())
    noise = (eager.squares + compiled.squares) / max(1, runs - 1) / runs
    if apart <= limit * noise:
        return ""
    return (f"{name}: over {runs} runs each, the means of eager and compiled are {(apart / noise) ** 0.5:.1f} times as "
            "far apart as the random draws explain")
