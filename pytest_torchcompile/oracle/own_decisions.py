"""Own decisions: which decisions compiled code has taken where it decides otherwise than eager, and rounding decides.

Wide runs take over what eager has decided on counted numbers (:mod:`~pytest_torchcompile.oracle.counted_decisions`).
Compiled code may rightly decide otherwise. Where something is wrong beside eager's decisions, a few runs with noise
show which of them rounding turns. Each is turned by itself in a run without noise. Of those runs follows which ones
bring the compiled values nearer: these are the decisions beside which they are judged once more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
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
# Edges of which each is tried by itself.
_MOST: Final = 32
# How far noise moves what is decided about, in parts of it: all elements so near to each other are one edge.
_NEAR: Final = 1e-5
# Elements at the end, which a loop over vectors may leave to another function.
_TAIL: Final = 64
_VECTOR: Final = 16
# A share of an edge in compiled values is no chance if it is so many times what chance makes of it.
_BEYOND_CHANCE: Final = 8.0
# Elements for each edge, without which nothing can be said.
_ROWS_EACH: Final = 4
# Elements of a leaf by which distances are measured, twice: those that are furthest off, and others.
_SAMPLED: Final = 1 << 11


@dataclass(frozen=True, eq=False)
class _Edge:
    """Elements of one decision that rounding turns together."""

    numbers: list[int]
    """Of the decisions, which are the same one in several passes."""
    places: torch.Tensor
    """Booleans, of the shape of the decision's result."""
    other: Any
    """What they become: one number or Boolean."""


@dataclass(frozen=True, eq=False)
class _Sample:
    """Elements of one leaf, by which distances are measured."""

    name: str
    places: torch.Tensor
    """Of the flat leaf."""
    scale: float
    """The root mean square of what is expected, times the root of how many elements there are."""


class _RunDeciding(Protocol):
    """Runs the program of a reference in a wide dtype."""

    def __call__(self, number: int, noise: float, decisions: DecisionReplay, rest: bool = True) -> Recording:
        """With the noise of ``number``, ``noise`` times as much as usual; 0: exactly.

        ``decisions``: are handed out to the run, or watch it. ``rest``: as for ``record``.
        """


class OwnDecisions:
    """Which decisions a program may take."""

    def __init__(self, taken: CountedDecisions, wide: torch.dtype, run: _RunDeciding,
                 expected: Mapping[str, Estimate]) -> None:
        """Take a program.

        Args:
            taken: What eager has decided.
            wide: The dtype of wide runs.
            run: Makes one.
            expected: What comes of it with eager's decisions.
        """
        self._taken, self._wide, self._run, self._expected = taken, wide, run, expected
        self._alike = _alike(taken)

    def likely_for(self, values: Mapping[str, Any], accused: Collection[str]) -> Iterator[CountedDecisions | None]:
        """Decisions that some compiled code has perhaps taken, by its values and the names of those that are wrong.

        None: any. Nothing where its values say that it has decided as eager has.
        """
        edges = self._edges
        if not edges:
            return
        if len(edges) <= _MOST:
            turned = self._turned(values, accused)
            if turned is None:
                return
            if turned:
                yield self._with(turned)
        yield None

    @cached_property
    def _edges(self) -> list[_Edge]:
        places: dict[tuple[int, Any, Any], torch.Tensor] = {}
        for number, noise in enumerate(_WATCHED):
            watch = DecisionWatch(self._taken, self._wide)
            if self._run(number, noise, watch).error is not None:
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
        differs = kept != other.result
        pairs = torch.stack([kept[differs].double(), other.result[differs].double()], 1).tolist()
        for mine, theirs in sorted({(pair[0], pair[1]) for pair in pairs}):
            places = differs & (kept == mine) & (other.result == theirs)
            if other.given is not None:
                middle = other.given[places].median()
                near = (other.given - middle).abs() <= _NEAR * middle.abs()
                places = places | (near & (kept == mine))
            yield (self._alike[other.number], mine, theirs), places

    def _turned(self, values: Mapping[str, Any], accused: Collection[str]) -> list[_Edge] | None:
        """The edges that compiled code has turned as a whole; None where its values say that it has turned none.

        Least squares say how much of what each edge moves is in the values. Of one that is turned it is 1, of one that
        is turned in some elements a share. Of an error that has nothing to do with it, it is zero but for chance.
        """
        names = [name for name in accused if name in self._expected and self._expected[name].continuous]
        if not names:
            # A whole number that is wrong has no distance.
            names = [name for name, estimate in self._expected.items() if estimate.continuous]
        if not names:
            return []
        samples = self._samples(values, names)
        error, effects = self._distances(values, samples), self._effects(samples)
        sizes = effects.norm(dim=0)
        moving = (sizes > 0).nonzero().view(-1)
        if not moving.numel():
            return None
        if len(error) < _ROWS_EACH * moving.numel():
            return []
        directions = effects[:, moving] / sizes[moving]
        shares = torch.linalg.lstsq(directions, error[:, None], driver="gelsd").solution.view(-1)
        chance = (error - directions @ shares).norm() / math.sqrt(len(error))
        if not bool((shares > _BEYOND_CHANCE * chance).any()):
            return None
        turned = moving[shares > sizes[moving] / 2]
        return [self._edges[place] for place in turned.tolist()]

    def _samples(self, values: Mapping[str, Any], names: Collection[str]) -> list[_Sample]:
        """Of each leaf the elements whose values are furthest off, and others at even distances."""
        samples = []
        for name in names:
            expected = self._expected[name].value
            places = _places(_apart(values.get(name), expected))
            size = 0.0
            if expected.numel():
                size = float(finite_values(expected.double()).square().mean().sqrt())
            samples.append(_Sample(name, places, (size or 1.0) * math.sqrt(max(1, len(places)))))
        return samples

    def _distances(self, values: Mapping[str, Any], samples: Collection[_Sample]) -> torch.Tensor:
        """What values are off by in the elements of the samples, each over its scale: one dimension, on the CPU."""
        distances = []
        for sample in samples:
            apart = _apart(values.get(sample.name), self._expected[sample.name].value)
            distances.append(apart[sample.places].cpu() / sample.scale)
        return torch.cat(distances)

    def _effects(self, samples: Collection[_Sample]) -> torch.Tensor:
        """What each edge moves where it alone is turned, a column for each. No run is kept: it has all gradients."""
        rest = need_second_pass(sample.name for sample in samples)
        columns = []
        for edge in self._edges:
            recording = self._run(0, 0.0, DecisionReplay(self._with([edge]), self._wide), rest=rest)
            columns.append(self._distances(recording.values_by_name(), samples))
        return torch.stack(columns, 1)

    def _with(self, edges: list[_Edge]) -> CountedDecisions:
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
    """Some elements, apart from those that a loop over vectors may leave to another function: the last ones of all, and
    of each row."""
    last = torch.zeros_like(places)
    last.view(-1)[-_TAIL:] = True
    last_of_row = torch.zeros_like(places)
    whole_vectors = places.shape[-1] // _VECTOR * _VECTOR if places.dim() else 0
    if places.dim() > 1:
        last_of_row[..., whole_vectors:] = True
    for part in (last, last_of_row & ~last, ~last & ~last_of_row):
        yield places & part


def _apart(value: Any, expected: torch.Tensor) -> torch.Tensor:
    """What each element of a value is off by (flat, float64); zeros for a value of another shape."""
    expected = expected.double()
    if isinstance(value, float):
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor) or as_real(value).shape != expected.shape:
        return torch.zeros_like(expected).reshape(-1)
    value = as_real(value.detach()).to(expected.device).double()
    return (finite_values(value) - finite_values(expected)).reshape(-1)


def _places(apart: torch.Tensor) -> torch.Tensor:
    """The elements by which a distance is measured."""
    if apart.numel() <= 2 * _SAMPLED:
        return torch.arange(apart.numel(), device=apart.device)
    furthest = apart.abs().topk(_SAMPLED).indices
    chosen = torch.zeros(apart.numel(), dtype=torch.bool, device=apart.device)
    chosen[furthest] = True
    chosen[:: math.ceil(apart.numel() / _SAMPLED)] = True
    return chosen.nonzero().view(-1)
