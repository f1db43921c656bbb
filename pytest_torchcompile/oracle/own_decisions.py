"""Own decisions: which decisions compiled code has taken where it decides otherwise than eager, and rounding decides.

Wide runs take over what eager has decided on counted numbers (:mod:`~pytest_torchcompile.oracle.counted_decisions`).
Compiled code may rightly decide otherwise. Where something is wrong beside eager's decisions, a few runs with noise
show which of them rounding turns. Each is turned by itself in a run without noise. Of those runs follows which ones
bring the compiled values nearer: these are the decisions beside which they are judged once more. What is wrong there
too is asked again, for edges move more together than each alone.

One function decides about numbers that are equal, so an edge is turned as a whole, but at the end of a loop over
vectors and in another layer. An error that only resembles an edge, as a wrong bucket does, is none beside any edge.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Protocol

import torch

from pytest_torchcompile.oracle.counted_decisions import (
    CountedDecisions,
    DecisionKey,
    DecisionReplay,
    DecisionWatch,
    OtherDecision,
)
from pytest_torchcompile.oracle.estimate import Estimate, as_real, finite_values
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.training import need_second_pass

__all__ = ["OwnDecisions"]

# Runs with noise that are watched, by how many times the usual noise they have. A decision that one in ten takes
# otherwise is missed once in ten times so.
_WATCHED: Final = (1.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 4.0)
# Runs in which an edge is turned, or a group of them where there are more.
_MOST: Final = 32
# How far noise moves what is decided about, in parts of it: all elements so near to each other are one edge.
_NEAR: Final = 1e-5
# Elements of a vector, and of the last ones of all: a loop over vectors may leave those at the end to another function.
_VECTORS: Final = (16, 8, 4)
_TAIL: Final = 64
# What an edge moves a leaf by, in parts of the leaf, is rounding below this.
_LEAST_MOVED: Final = 1e-11
# A share of an edge in compiled values is no chance if it is so many times what chance makes of it.
_BEYOND_CHANCE: Final = 8.0
# How near to 1 the share of an edge is that is turned: two that move much move less or more together.
_TURNED: Final = 1 / 2
# How many times what a right leaf is off by an edge may move it. Two edges may cancel each other in a few elements.
_SEEN_BY_WITNESS: Final = 8.0
_FEWEST_SEEN: Final = 16
# Elements for each edge, without which nothing can be said.
_ROWS_EACH: Final = 4
# Elements of a leaf by which distances are measured, twice: those that are furthest off, and others.
_SAMPLED: Final = 1 << 10
# Rounds of a fit, and the least that a leaf is off by in it, in parts of the largest.
_ROUNDS: Final = 12
_LEAST_OFF: Final = 1e-3


@dataclass(frozen=True, eq=False)
class _Edge:
    """Elements of one decision that rounding turns together."""

    numbers: list[int]
    """Of the decisions, which are the same one in several passes."""
    places: torch.Tensor
    """Booleans, of the shape of the decision's result."""
    other: Any
    """What they become: one number or Boolean."""


class _Sample:
    """Elements of one leaf, by which distances are measured."""

    def __init__(self, name: str, value: torch.Tensor, expected: torch.Tensor) -> None:
        """Those that are furthest off, and others at even distances."""
        self.name, self.shape = name, expected.shape
        self._places = _places(_apart(value, expected.reshape(-1)))
        self._expected = expected.reshape(-1)[self._places]
        size = float(finite_values(expected.double()).square().mean().sqrt()) if expected.numel() else 0.0
        # The root mean square of what is expected, times the root of how many elements there are.
        self._scale = (size or 1.0) * math.sqrt(max(1, len(self._places)))

    def distances(self, values: Mapping[str, Any]) -> torch.Tensor:
        """What values are off by, in parts of the leaf: one dimension, float64, on the CPU."""
        value = _number(values.get(self.name))
        if value is None or value.shape != self.shape:
            return torch.zeros(len(self._places), dtype=torch.float64)
        return _apart(value.reshape(-1)[self._places.to(value.device)], self._expected).cpu() / self._scale


class _RunDeciding(Protocol):
    """Runs the program of a reference in a wide dtype."""

    def __call__(self, number: int, noise: float, decisions: DecisionReplay, rest: bool = True) -> Recording:
        """With the noise of ``number``, ``noise`` times as much as usual; 0: exactly.

        ``decisions``: are handed out to the run, or watch it. ``rest``: as for ``record``.
        """


class OwnDecisions:
    """Which decisions a program may take."""

    def __init__(self, taken: CountedDecisions, wide: torch.dtype, run: _RunDeciding,
                 expected: Mapping[str, Estimate], together: bool) -> None:
        """Take a program.

        Args:
            taken: What eager has decided, or another run.
            wide: The dtype of wide runs.
            run: Makes one.
            expected: What comes of it with these decisions.
            together: The same edge in several layers is turned in all of them, if that is likely; else in each by
                itself, as where a layer is not compiled.
        """
        self._taken, self._wide, self._run, self._expected = taken, wide, run, expected
        self._together = together
        self._alike = _alike(taken)

    def taken_by(self, values: Mapping[str, Any], accused: Collection[str]) -> CountedDecisions | None:
        """What some compiled code has perhaps decided, by its values and the names of those that are wrong.

        None where its values say that it has decided as the program given. Nothing is taken where they are too few to
        tell: then any decisions may be right.
        """
        turned = None
        if self._together:
            turned = self._turned(self._edges, values, accused)
        are_shared = any(len(edge.numbers) > 1 for edge in self._edges)
        if not self._together or (turned is None and are_shared):
            turned = self._turned(self._edges_by_layer(), values, accused)
        if turned is None:
            return None
        return self._with(turned) if turned else CountedDecisions()

    def _edges_by_layer(self) -> list[_Edge]:
        """Each edge of each decision by itself, in the order of the program: so a group of them is of one layer."""
        alone = []
        for edge in self._edges:
            alone += [replace(edge, numbers=[number]) for number in edge.numbers]
        return sorted(alone, key=lambda edge: edge.numbers[0])

    @cached_property
    def _edges(self) -> list[_Edge]:
        places: dict[tuple[int, Any, Any], torch.Tensor] = {}
        for number, noise in enumerate(_WATCHED):
            watch = DecisionWatch(self._taken, self._wide)
            if self._run(number, noise, watch).error is not None:
                # A program may raise where noise turns what it checks. The others tell enough.
                continue
            for other in watch.others:
                for key, found in self._places_of(other):
                    places[key] = found | places.get(key, found)
        edges = []
        for (first, _, other_value), found in places.items():
            numbers = [number for number, alike in self._alike.items() if alike == first]
            for part in _parts(found):
                if bool(part.any()):
                    edges.append(_Edge(numbers, part, other_value))
        return edges

    def _places_of(self, other: OtherDecision) -> Iterator[tuple[tuple[int, Any, Any], torch.Tensor]]:
        """By the first decision of its kind, what eager has decided and what else comes of it: the elements that are so
        near to that edge."""
        _, kept = self._taken.taken[other.number]
        if kept is None:
            return
        # No NaN equals another.
        differs = (kept != other.result) & ~(kept.isnan() & other.result.isnan())
        pairs = torch.stack([kept[differs].double(), other.result[differs].double()], 1).tolist()
        for mine, theirs in sorted({(pair[0], pair[1]) for pair in pairs}):
            places = differs & (kept == mine) & (other.result == theirs)
            if other.given is not None:
                middle = other.given[places].median()
                near = (other.given - middle).abs() <= _NEAR * middle.abs()
                places = places | (near & (kept == mine))
            yield (self._alike[other.number], mine, theirs), places

    def _turned(self, edges: Sequence[_Edge], values: Mapping[str, Any],
                accused: Collection[str]) -> list[_Edge] | None:
        """Which edges compiled code has turned; None where its values say that it has turned none.

        Nothing where there are too few values to tell. An edge that would move what is right has not been turned. Of
        the others a fit says how much of what each moves is in the wrong values: 1 of one that is turned.
        """
        wrong, right = self._samples(values, accused)
        if not edges or not wrong:
            return None
        size = math.ceil(len(edges) / _MOST)
        groups = [edges[start:start + size] for start in range(0, len(edges), size)]
        effects = self._effects(groups, [*wrong, *right])
        moving = torch.stack([effect.norm(dim=0) > _LEAST_MOVED for effect in effects[:len(wrong)]]).any(0)
        for sample, effect in zip(right, effects[len(wrong):], strict=True):
            moving &= effect.norm(dim=0) <= _LEAST_MOVED + _SEEN_BY_WITNESS * sample.distances(values).norm()
        candidates = moving.nonzero().view(-1)
        if not candidates.numel():
            return None
        errors = [sample.distances(values) for sample in wrong]
        if not any(bool(error.any()) for error in errors):
            return None
        if sum(map(len, errors)) < _ROWS_EACH * len(candidates):
            return []
        fit = _fit(errors, [effect[:, candidates] for effect in effects[:len(wrong)]])
        is_turned = (fit.shares > _BEYOND_CHANCE * fit.chance) & ((fit.shares - 1).abs() < _TURNED)
        turned: list[_Edge] = []
        for place in candidates[is_turned].tolist():
            turned += groups[place]
        return turned or None

    def _samples(self, values: Mapping[str, Any], accused: Collection[str]) -> tuple[list[_Sample], list[_Sample]]:
        """Of leaves that are wrong, and of those that are right and that runs of one edge have."""
        rest = need_second_pass(accused)
        wrong, right = [], []
        for name, estimate in self._expected.items():
            value, expected = _number(values.get(name)), estimate.value
            # A leaf that is lost, or of another shape, has no distance.
            if value is None or not isinstance(expected, torch.Tensor) or value.shape != expected.shape:
                continue
            if name in accused:
                wrong.append(_Sample(name, value, expected))
            elif expected.numel() >= _FEWEST_SEEN and (rest or not need_second_pass([name])):
                right.append(_Sample(name, value, expected))
        return wrong, right

    def _effects(self, groups: Iterable[Iterable[_Edge]], samples: Collection[_Sample]) -> list[torch.Tensor]:
        """What each group moves where it alone is turned: of each sample its elements by groups. No run is kept: it has
        all gradients."""
        rest = need_second_pass(sample.name for sample in samples)
        by_group = []
        for group in groups:
            recording = self._run(0, 0.0, DecisionReplay(self._with(group), self._wide), rest=rest)
            found = recording.values_by_name()
            by_group.append([sample.distances(found) for sample in samples])
        return [torch.stack(columns, 1) for columns in zip(*by_group, strict=True)]

    def _with(self, edges: Iterable[_Edge]) -> CountedDecisions:
        results: dict[int, torch.Tensor] = {}
        for edge in edges:
            for number in edge.numbers:
                _, kept = self._taken.taken[number]
                if kept is not None:
                    kept = results.get(number, kept).clone()
                    kept[edge.places] = edge.other
                    results[number] = kept
        return self._taken.changed(results)


def _alike(taken: CountedDecisions) -> dict[int, int]:
    """By the number of each decision that of the first one which is the same.

    A second pass through a model takes them once more, and compiled code has one for both.
    """
    firsts: dict[DecisionKey, list[tuple[int, torch.Tensor]]] = {}
    alike = {}
    for number, (key, kept) in enumerate(taken.taken):
        if kept is None:
            continue
        known = firsts.setdefault(key, [])
        first = next((each for each, other in known if torch.equal(other, kept)), number)
        if first == number:
            known.append((number, kept))
        alike[number] = first
    return alike


def _parts(places: torch.Tensor) -> Iterator[torch.Tensor]:
    """Some elements, apart from those that a loop over vectors may leave to another function: at the end of all, and of
    each row."""
    # Contiguous, whatever the strides of the decision are.
    end = torch.zeros(places.shape, dtype=torch.int64, device=places.device)
    for size in _VECTORS:
        if places.dim() > 1:
            end[..., places.shape[-1] // size * size:] += 1
    for count in (_TAIL, *(places.numel() % size for size in _VECTORS)):
        if count:
            end.view(-1)[-count:] += len(_VECTORS) + 1
    for kind in sorted(set(end[places].tolist())):
        yield places & (end == kind)


@dataclass(frozen=True, eq=False)
class _Fit:
    """How much of what each edge moves is in some values."""

    shares: torch.Tensor
    chance: torch.Tensor
    """What chance makes of each share."""


def _fit(errors: Sequence[torch.Tensor], effects: Sequence[torch.Tensor]) -> _Fit:
    """Fit edges to what leaves are off by.

    Least is the sum of the lengths of what is left of the leaves, not of their squares: a gradient that is wrong for
    another reason bends no share then. It is found by least squares in which each leaf weighs less the more of it was
    left before (Weiszfeld's way to the geometric median).

    Args:
        errors: Of each leaf its elements.
        effects: Of each leaf its elements by edges.
    """
    # All that least squares need of a leaf.
    squares = torch.stack([effect.T @ effect for effect in effects])
    products = torch.stack([effect.T @ error for error, effect in zip(errors, effects, strict=True)])
    lengths = torch.stack([error @ error for error in errors])
    least = _LEAST_OFF * float(lengths.max().sqrt())
    weights = torch.ones(len(errors), dtype=torch.float64)
    for _ in range(_ROUNDS):
        square, product = torch.einsum("l,lij->ij", weights, squares), weights @ products
        sizes = square.diagonal().sqrt()
        scaled = torch.linalg.lstsq(square / sizes.outer(sizes), (product / sizes)[:, None], driver="gelsd").solution
        shares = scaled.view(-1) / sizes
        left = (lengths - 2 * products @ shares + torch.einsum("i,lij,j->l", shares, squares, shares)).clamp(min=0)
        chance = (weights @ left / sum(map(len, errors))).sqrt() / sizes
        weights = 1 / (least + left.sqrt())
    return _Fit(shares, chance)


def _number(value: Any) -> torch.Tensor | None:
    """A value as a tensor of real numbers; None for what is no number."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return as_real(value.detach()) if isinstance(value, torch.Tensor) else None


def _apart(value: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """What each element of a value is off by (flat, float64); nothing where either is not finite."""
    return finite_values(value.reshape(-1).to(expected.device).double() - expected.double())


def _places(apart: torch.Tensor) -> torch.Tensor:
    """The elements by which a distance is measured."""
    if apart.numel() <= 2 * _SAMPLED:
        return torch.arange(apart.numel(), device=apart.device)
    furthest = apart.abs().topk(_SAMPLED).indices
    chosen = torch.zeros(apart.numel(), dtype=torch.bool, device=apart.device)
    chosen[furthest] = True
    chosen[:: math.ceil(apart.numel() / _SAMPLED)] = True
    return chosen.nonzero().view(-1)
