"""Models that draw random numbers: eager and compiled runs compared by their means over many draws.

Inductor draws other random numbers than eager does (unless ``torch._inductor.config.fallback_random`` is set), so
that two runs of a model with dropout never agree element by element. Their means do. For each leaf, with m runs of
each kind and different seeds,

    ratio = |mean(eager) - mean(compiled)|^2 / (2/m * (var(eager) + var(compiled)) / 2)

where squares are summed over the elements: the square of what :func:`~pytest_torchcompile.oracle.chances.welch` gives.
It is 1 on average where both draw from one distribution. Nothing is assumed of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

import torch

from pytest_torchcompile.oracle.chances import Moments, is_rounding, welch
from pytest_torchcompile.oracle.recording import Recording

__all__ = ["FIRST", "SECOND", "Means", "compare_means"]

FIRST: Final = (12, 6.0)
"""Runs of each kind, and the ratio from which a leaf is suspected (a correct leaf of one element: about 2 in 100)."""
SECOND: Final = (48, 16.0)
"""Fresh runs that a suspicion buys, and the ratio from which it is a verdict (about 1 in 10 000)."""


@dataclass(frozen=True)
class Means:
    """What the means say."""

    random: frozenset[str]
    """Leaves that differ between two eager runs: only of these can the means speak."""
    differing: dict[str, str]
    """Of these, the ones whose means differ by more than chance, each with a line that says so."""
    runs: int = 0
    """How many of each kind were made."""
    error: str = ""
    """The first run that raised."""


def compare_means(
    eager: Callable[[int], Recording], compiled: Callable[[int], Recording], any_rank: Callable[[bool], bool] = bool
) -> Means:
    """Compare many runs ``eager(seed)`` with as many ``compiled(seed)``, each from one and the same state.

    ``any_rank`` makes one answer of those of all ranks; it is asked in the same places on each.
    """
    random: frozenset[str] = frozenset()
    differing: dict[str, str] = {}
    suspected: Collection[str] | None = None
    start = 1
    for runs, limit in (FIRST, SECOND):
        eager_leaves, compiled_leaves = _Leaves(suspected), _Leaves(suspected)
        for seed in range(start, start + runs):
            # Seeds of its own for each: a backend that draws as eager does must not look more alike than chance has it.
            for leaves, run, own_seed in ((eager_leaves, eager, 2 * seed), (compiled_leaves, compiled, 2 * seed + 1)):
                recording = run(own_seed)
                error = recording.error or _error_of_adding(leaves, recording)
                if any_rank(error is not None):
                    return Means(random, {}, start, str(error or "it raises on another rank"))
        random |= eager_leaves.random()
        differing = _differing(random, eager_leaves, compiled_leaves, limit)
        # The next runs are fresh ones: a suspicion must not be its own witness.
        start += runs
        if not any_rank(bool(differing)):
            break
        suspected = differing
    return Means(random, differing, start - 1)


@dataclass
class _Leaves:
    """The moments of each leaf over many runs of one kind."""

    only: Collection[str] | None
    """Names of the leaves that are of interest; None: all."""
    moments: dict[str, Moments] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    """Kind of each leaf, as ``Recording.values`` gives it."""
    largest: dict[str, float] = field(default_factory=dict)
    """By kind, the largest root mean square that any leaf had in any run."""

    def random(self) -> set[str]:
        """Leaves that were not the same in each run."""
        return {name for name, moments in self.moments.items() if moments.squares > 0}


def _error_of_adding(leaves: _Leaves, recording: Recording) -> Exception | None:
    """Add a run, and return what that raises: other ranks are told as they are of a run that raises."""
    try:
        _add_run(leaves, recording)
    except Exception as error:
        return error
    return None


def _add_run(leaves: _Leaves, recording: Recording) -> None:
    for name, kind, value in recording.values():
        if not isinstance(value, torch.Tensor) or not value.numel():
            continue
        numbers = _real_numbers(value)
        leaves.kinds[name] = kind
        leaves.largest[kind] = max(leaves.largest.get(kind, 0.0), _root_mean_square(numbers))
        if leaves.only is not None and name not in leaves.only:
            continue
        moments = leaves.moments.get(name)
        if moments is None:
            leaves.moments[name] = Moments(numbers.clone())
        elif moments.mean.shape == numbers.shape:
            moments.add(numbers)


def _real_numbers(value: torch.Tensor) -> torch.Tensor:
    """The values as wide real numbers; what is no number counts as 0."""
    numbers = value
    if numbers.layout is not torch.strided:
        numbers = numbers.to_dense()
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj())
    # MPS has no float64.
    wide = torch.float32 if numbers.device.type == "mps" else torch.float64
    return numbers.to(wide).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _differing(random: frozenset[str], eager: _Leaves, compiled: _Leaves, limit: float) -> dict[str, str]:
    differing: dict[str, str] = {}
    for name in random & eager.moments.keys():
        if _is_rounding(name, eager) and _is_rounding(name, compiled):
            continue
        line = _difference(name, eager.moments[name], compiled.moments.get(name), limit)
        if line:
            differing[name] = line
    return differing


def _is_rounding(name: str, leaves: _Leaves) -> bool:
    """Whether a leaf is on average what :func:`~pytest_torchcompile.oracle.chances.is_rounding` says."""
    moments = leaves.moments.get(name)
    if moments is None:
        return False
    spread = math.sqrt(moments.squares / moments.count / max(1, moments.mean.numel()))
    return is_rounding(_root_mean_square(moments.mean) + spread, leaves.largest[leaves.kinds[name]])


def _root_mean_square(numbers: torch.Tensor) -> float:
    return float(numbers.square().mean().sqrt())


def _difference(name: str, eager: Moments, compiled: Moments | None, limit: float) -> str:
    """How a leaf's means differ, in one line, or ''."""
    if compiled is None:
        return f"{name}: only eager has it"
    if compiled.mean.shape != eager.mean.shape:
        return f"{name}: its shape differs"
    distance = welch(eager, compiled)
    # not (a <= b): values too large for their own squares tell nothing
    if not distance * distance > limit:
        return ""
    runs = min(eager.count, compiled.count)
    return (f"{name}: over {runs} runs each, the means of eager and compiled are {distance:.1f} times as far apart as "
            "the random draws explain")
