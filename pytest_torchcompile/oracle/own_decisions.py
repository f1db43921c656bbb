"""Own decisions: which decisions compiled code has taken where it decides otherwise than eager, and rounding decides.

Wide runs take over what eager has decided on counted numbers (:mod:`~pytest_torchcompile.oracle.counted_decisions`).
Compiled code may rightly decide otherwise. Where something is wrong beside eager's decisions, a few runs with noise
show which of them rounding turns. Each is turned by itself in a run without noise. Of those runs follows which ones
bring the compiled values nearer: these are the decisions beside which they are judged once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

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

__all__ = ["OwnDecisions"]

# Runs with noise that are watched. A decision that one in three takes otherwise is missed once in 25 times.
_WATCHED: Final = 8
# Edges of which each is tried by itself.
_MOST: Final = 32
# How far noise moves what is decided about, in parts of it: all elements so near to each other are one edge.
_NEAR: Final = 1e-5
# Elements at the end, which a loop over vectors may leave to another function.
_TAIL: Final = 64
# An edge is taken to be turned if that leaves less than so much of the square of the distance.
_ENOUGH: Final = 0.9
# Elements of a leaf by which distances are measured.
_SAMPLED: Final = 1 << 12


@dataclass(frozen=True, eq=False)
class _Edge:
    """Elements of one decision that rounding turns together."""

    numbers: list[int]
    """Of the decisions, which are the same one in several passes."""
    places: torch.Tensor
    """Booleans, of the shape of the decision's result."""
    other: Any
    """What they become: one number or Boolean."""


class OwnDecisions:
    """Which decisions a program may take."""

    def __init__(self, taken: CountedDecisions, wide: torch.dtype, run: Callable[[int, DecisionReplay], Recording],
                 expected: Mapping[str, Estimate]) -> None:
        """Take a program.

        Args:
            taken: What eager has decided.
            wide: The dtype of wide runs.
            run: Makes one, with the noise of this number; 0: without. It is handed decisions, or watched.
            expected: What comes of it with eager's decisions.
        """
        self._taken, self._wide, self._run, self._expected = taken, wide, run, expected
        self._alike = _alike(taken)

    def likely_for(self, values: Mapping[str, Any], accused: Collection[str]) -> Iterator[CountedDecisions | None]:
        """Decisions that some compiled code has perhaps taken, by its values and the names of those that are wrong.

        None: any. Nothing where its values say that it has decided as eager has.
        """
        edges = self._edges()
        if not edges:
            return
        if len(edges) <= _MOST:
            turned = self._turned(edges, values, accused)
            if not turned:
                return
            yield self._with(turned)
        yield None

    def _edges(self) -> list[_Edge]:
        places: dict[tuple[int, Any, Any], torch.Tensor] = {}
        for number in range(1, 1 + _WATCHED):
            watch = DecisionWatch(self._taken, self._wide)
            if self._run(number, watch).error is not None:
                continue
            for other in watch.others:
                for key, found in self._places_of(other):
                    places[key] = found | places.get(key, found)
        edges = []
        for (first, _, other_value), found in places.items():
            numbers = [number for number, alike in self._alike.items() if alike == first]
            in_tail = torch.zeros_like(found)
            in_tail.view(-1)[-_TAIL:] = True
            for part in (found & in_tail, found & ~in_tail):
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

    def _turned(self, edges: list[_Edge], values: Mapping[str, Any], accused: Collection[str]) -> list[_Edge]:
        """The edges that bring the values nearer to what is expected where they are turned, one after the other."""
        names = [name for name in accused if name in self._expected and self._expected[name].continuous]
        if not names:
            names = [name for name, estimate in self._expected.items() if estimate.continuous]
        left = self._distances(values, names)
        effects = []
        for edge in edges:
            recording = self._run(0, DecisionReplay(self._with([edge]), self._wide))
            effects.append(self._distances(recording.values_by_name(), names))
        turned: list[_Edge] = []
        while len(turned) < len(edges):
            remaining = [float((left - effect).square().sum()) for effect in effects]
            best = min(range(len(edges)), key=remaining.__getitem__)
            if not remaining[best] < _ENOUGH * float(left.square().sum()) or edges[best] in turned:
                break
            turned.append(edges[best])
            left = left - effects[best]
        return turned

    def _distances(self, values: Mapping[str, Any], names: Collection[str]) -> torch.Tensor:
        """What some elements of these leaves are off by, over the root mean square of what is expected (one row)."""
        distances = []
        for name in names:
            expected = _sample(self._expected[name].value)
            value = values.get(name)
            apart = torch.zeros_like(expected)
            if isinstance(value, float):
                value = torch.tensor(value)
            if isinstance(value, torch.Tensor) and as_real(value).shape == self._expected[name].value.shape:
                apart = finite_values(_sample(as_real(value.detach())) - expected)
            size = float(finite_values(expected).square().mean().sqrt()) if expected.numel() else 0.0
            distances.append(apart / (size or 1.0) / math.sqrt(max(1, apart.numel())))
        return torch.cat(distances) if distances else torch.zeros(1, dtype=torch.float64)

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


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements at even distances, on the CPU in float64."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)].cpu().double()
