"""LeafJudge: values of two recordings, bitwise, then by the reference, by more draws, and beside a second eager run.

What it judges is listed by :func:`~pytest_torchcompile.oracle.comparison.compare`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Final

import torch

from pytest_torchcompile.oracle.dice import FEW
from pytest_torchcompile.oracle.estimate import CANCELLED, ROUNDINGS, as_real
from pytest_torchcompile.oracle.expected import FAR, WIDER, Reference, distance_from_runs, eager_is_near
from pytest_torchcompile.oracle.judging import (
    ROUNDING_MOVES,
    excused_difference,
    judge_beside_orders,
    judge_values,
    limits_without_draws,
    new_leaf,
)
from pytest_torchcompile.oracle.leaf_limits import Leaf, Limits, problem
from pytest_torchcompile.oracle.leaf_state import LeafState, LeafValues, leaf_without_reference
from pytest_torchcompile.oracle.measurement import measure_together, read_numbers
from pytest_torchcompile.oracle.operator_rounding import unit_of
from pytest_torchcompile.oracle.properties import ABSENT, compare_items
from pytest_torchcompile.oracle.recording import Item, Recording
from pytest_torchcompile.oracle.same_values import same_bits_on_gpu, same_but_for_rounding
from pytest_torchcompile.oracle.settling import Settling, settle

__all__ = ["LeafJudge"]

_WAVERS: Final = (
    "two eager runs from one state and seed differ by more than rounding, "
    "so nothing can be said about the compiled one"
)

# Fewer leaves do not tell what most do.
_MANY: Final = 16
# Share of a leaf's elements: of an embedding only the rows of words that occur are off.
_OFF_AT_LEAST: Final = 1 / 8


class LeafJudge:
    """Judges values: bitwise, then by the reference, then by more draws, then beside a second eager run."""

    def __init__(self, reference: Reference | Callable[[], Reference], limits: Limits, eager: Recording) -> None:
        """As for ``compare``; ``eager`` is the whole recording."""
        self._source, self._limits = reference, limits
        self._eager = eager
        self._gradient_size: float | None = None
        self._gradient_count: int | None = None
        self._eps = 0.0
        # What a leaf must hold that no noise is drawn for.
        self._without_draws = limits_without_draws(limits)
        # Whether the two have drawn other random numbers: no noise makes values alike that are far off for that.
        self.other_draws = False
        # Of the leaves that are not equal bit for bit, by name.
        self._states: dict[str, LeafState] = {}
        # Whether tensors on a GPU are equal, of all that were asked for at once.
        self._equal: dict[str, bool] = {}

    def look_at(self, all_values: Iterable[LeafValues]) -> None:
        """Compare tensors on a GPU bit by bit, all before the first answer is waited for."""
        self._equal = same_bits_on_gpu((values.name, values.eager, values.compiled) for values in all_values)

    def first_leaf(self, values: LeafValues, judged: Leaf | None = None) -> Leaf:
        """The leaf of a value that nothing has to be measured for; of any other one that :meth:`decide` measures.

        ``judged``: what is known of it.
        """
        leaf = leaf_without_reference(values, self._equal.get(values.name))
        if leaf is not None:
            return leaf
        self._states[values.name] = LeafState(values, judged)
        if judged is not None:
            return judged
        return Leaf(values.name, values.kind)

    def _measure_all(self, names: Collection[str], first: bool) -> dict[str, Leaf]:
        """Of some values: in one go what can be, the others one by one.

        ``first``: nothing was asked for yet. Then what eager's own error is no measure of is left for later.
        """
        settlings = self._settle(names)
        found = {}
        for name in names:
            state, settling = self._states[name], settlings.get(name)
            values, is_drawn = state.values, self._is_drawn_for(name)
            if settling is not None and settling.is_settled:
                found[name] = settling.leaf
                state.is_settled = not is_drawn
            # A closer look tells no more of what other random numbers have set apart.
            elif settling is not None and is_drawn and self.other_draws and settling.is_far_off:
                found[name] = settling.leaf
                state.is_apart = True
            elif first and isinstance(values.eager, torch.Tensor) and self._is_far(values, settling):
                found[name] = self._far_leaf(state, settling)
            elif first and settling is not None and settling.wants_draw:
                found[name] = settling.leaf
            else:
                found[name] = self._measure(values)
        return found

    def _is_drawn_for(self, name: str) -> bool:
        estimate = self._reference().estimates.get(name)
        return estimate is not None and estimate.offered > 0

    def _settle(self, names: Collection[str]) -> dict[str, Settling]:
        """All that can be measured in one go."""
        settlings = settle((self._states[name].values for name in names), self._reference(), self._limits)
        for name in names:
            # A further draw may move what the ones before have left in place.
            self._states[name].is_calm = None
        for name, settling in settlings.items():
            state = self._states[name]
            state.is_calm, state.typical = settling.is_calm, settling.typical
            state.is_alike = settling.apart <= self._eps**0.5 * settling.usual
        return settlings

    def _far_leaf(self, state: LeafState, settling: Settling | None) -> Leaf:
        """Of a value that eager is far from: undecided at once where it is zero but for rounding, else it waits.

        Then eager has nothing but its error there, and that is noise: no more than rounding the largest gradient
        leaves. The gradient of a key's bias is such a leaf in most transformers, and often the only one to want a draw.
        """
        values = state.values
        if values.kind == "gradient" and settling is not None:
            rounding = ROUNDINGS * unit_of(values.eager.dtype)
            # The largest gradient is looked for where it may matter.
            if settling.expected_size <= CANCELLED * settling.eager_size and (
                    settling.eager_size <= rounding * self._largest_gradient()):
                leaf = self._measure(values)
                if not leaf.decided and problem(leaf, self._without_draws) is None:
                    state.is_settled = True
                    return leaf
        state.is_waiting = True
        return new_leaf(values.name, values.kind, values.eager)

    def _largest_gradient(self) -> float:
        """The largest root mean square of any gradient of eager's."""
        if self._gradient_size is None:
            squares: list[torch.Tensor] = []
            # Those of a training are among its outputs.
            for _, kind, value in self._eager.values():
                if kind != "gradient" or not isinstance(value, torch.Tensor) or not value.numel():
                    continue
                if value.is_floating_point() or value.is_complex():
                    squares.append(as_real(value).float().square().mean())
            # Beginning with 0.0, for no comparison with NaN holds: it is passed over.
            self._gradient_size = max([0.0, *read_numbers(*squares)]) ** 0.5
        return self._gradient_size

    def decide(self, leaves: list[Leaf]) -> list[Leaf]:
        """Draw noise for the leaves that are still suspicious, until none is, or all draws are made."""
        try:
            return self._decide(leaves)
        finally:
            if isinstance(self._source, Reference):
                self._source.end_draws()

    def _decide(self, leaves: list[Leaf]) -> list[Leaf]:
        places = {}
        for place, leaf in enumerate(leaves):
            state = self._states.get(leaf.name)
            # Another kind is about a property of a value of this name.
            if state is not None and state.values.kind == leaf.kind and state.judged is None:
                places[leaf.name] = place
        if not places:
            return leaves
        # Of the narrowest dtype around.
        self._eps = max((torch.finfo(tensor.dtype).eps for _, tensor in self._numbers()), default=0.0)
        for name, leaf in self._measure_all(places, first=True).items():
            leaves[places[name]] = leaf
        # Eager's own error has decided about those that are settled: no draw can say more.
        wanting = self._waiting_names()
        wanting += self._wanting([leaves[place] for name, place in places.items() if name not in wanting])
        while wanting and self._reference().more(wanting):
            for name, leaf in self._measure_all(wanting, first=False).items():
                leaves[places[name]] = leaf
                self._states[name].is_waiting = False
            wanting = self._wanting([leaves[place] for place in places.values()], wanting)
        for name in self._waiting_names():
            leaves[places[name]] = self._measure(self._states[name].values)
        asking = [name for name, place in places.items() if self._needs_second_run(leaves[place])]
        wavering = self._wavering(asking)
        for name in wavering:
            leaves[places[name]] = self._wavering_leaf(leaves[places[name]], self._states[name].values)
        repeated = [leaves[place] for name, place in places.items() if name not in wavering]
        for leaf in self.with_excuses(repeated):
            leaves[places[leaf.name]] = leaf
        return leaves

    def _waiting_names(self) -> list[str]:
        return [name for name, state in self._states.items() if state.is_waiting]

    def _numbers(self) -> list[tuple[str, torch.Tensor]]:
        """Eager's floating and complex tensors that are not equal bit for bit, with their kinds."""
        pairs = [(state.values.kind, state.values.eager) for state in self._states.values()]
        tensors = [(kind, value) for kind, value in pairs if isinstance(value, torch.Tensor)]
        return [(kind, tensor) for kind, tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]

    def problem_of(self, leaf: Leaf, limits: Limits | None = None) -> str | None:
        """What is wrong with a leaf, by other limits than those that were given if need be; None where nothing is.

        A verdict on gradients looks at all of them together. A worst element that will pass there is no problem here.
        """
        if limits is None:
            limits = self._limits
        if leaf.kind != "gradient":
            return problem(leaf, limits)
        if self._gradient_count is None:
            self._gradient_count = sum(tensor.numel() for kind, tensor in self._numbers() if kind == "gradient")
        return problem(leaf, replace(limits, looks=max(limits.looks, self._gradient_count)))

    def with_excuses(self, leaves: Iterable[Leaf], why: str = ROUNDING_MOVES) -> Iterator[Leaf]:
        """Of some leaves those that are excused, with the difference if it is worth telling."""
        excused, texts = [], []
        for leaf in leaves:
            state = self._states[leaf.name]
            eager = state.values.eager
            if not leaf.numerical or not isinstance(eager, torch.Tensor):
                continue
            compiled = state.values.compiled.to(eager.device, eager.dtype)
            if self.problem_of(leaf) is None:
                if leaf.decided and not state.is_alike:
                    excused.append(leaf)
                    texts.append(excused_difference(eager, compiled, self._eps, why))
            # Nor do other orders of summation explain other random numbers.
            elif not leaf.message and not state.is_apart:
                yield judge_beside_orders(leaf, eager, compiled, self._reference(), self._limits)
        for leaf, text in zip(excused, measure_together(texts), strict=True):
            yield replace(leaf, excused=text)

    def _wavering_leaf(self, leaf: Leaf, values: LeafValues) -> Leaf:
        """Undecidable, unless compiled is far outside of what eager's own runs differ by."""
        runs = [values.eager]
        for twin in self._reference().twins():
            item = twin.item_named(leaf.name)
            if item is not None:
                runs.append(item.value)
        far = distance_from_runs(values.compiled, runs)
        if far <= FAR:
            return replace(leaf, kind="nondeterministic", message=_WAVERS)
        text = f"is {far:.3g} times as far from the nearest of {len(runs)} eager runs as these are apart"
        return replace(leaf, message=f"{text} (limit {FAR:g}; eager does not repeat itself)")

    def excuse_wavering(self, leaves: list[Leaf], with_twin: Callable[[Recording], Iterable[Leaf]]) -> list[Leaf]:
        """Leaves about properties, where ``with_twin`` compares eager with a second eager run: what differs there too
        is nobody's fault but the model's."""
        if not any(problem(leaf, self._limits) for leaf in leaves):
            return leaves
        wavering = set()
        for leaf in with_twin(self._reference().twin()):
            # Without a message the two eager runs agree there.
            if leaf.message:
                wavering.add((leaf.name, leaf.kind))
        excused = []
        for leaf in leaves:
            if (leaf.name, leaf.kind) in wavering:
                leaf = replace(leaf, kind="nondeterministic", message=_WAVERS)
            excused.append(leaf)
        return excused

    def _wanting(self, leaves: list[Leaf], names: Collection[str] | None = None) -> list[str]:
        """Of some of all measured leaves, or of all, those of which more draws may say something else.

        They say nothing of what other random numbers have set apart: of a leaf that is far off after a draw; where most
        are far off, of each that is off; and where most are off, of each that is off after a few. Noise may be too wide
        for far.
        """
        chosen = [leaf for leaf in leaves if names is None or leaf.name in names]
        wanting = [leaf for leaf in chosen if not self._states[leaf.name].is_settled and self._is_suspicious(leaf)]
        if self.other_draws:
            # Eager's own error is the first draw.
            wanting = [leaf for leaf in wanting if leaf.draws <= 1 or not self._is_set_apart(leaf)]
            all_measured = [*leaves, *(state.judged for state in self._states.values() if state.judged is not None)]
            most = max(len(all_measured), _MANY) / 2
            few = FEW
            if sum(self._is_set_apart(leaf) for leaf in all_measured) > most:
                few = 1
            if sum(leaf.wrong > 1 / 2 for leaf in all_measured) > most:
                wanting = [leaf for leaf in wanting if leaf.draws <= few or leaf.wrong < _OFF_AT_LEAST]
        return [leaf.name for leaf in wanting]

    def _is_set_apart(self, leaf: Leaf) -> bool:
        return leaf.far_off or self._states[leaf.name].is_apart

    def _is_suspicious(self, leaf: Leaf) -> bool:
        """Whether more draws may say something else: of a problem, or of what a few draws cannot decide."""
        estimate = self._reference().estimates.get(leaf.name)
        if self.problem_of(leaf) is not None:
            return True
        if estimate is None or estimate.offered >= FEW:
            return False
        if not estimate.offered and self.problem_of(leaf, self._without_draws) is not None:
            return True
        undecided = bool(leaf.undecidable) or not (leaf.decided or leaf.drowned)
        return undecided or not (estimate.offered or eager_is_near(self._states[leaf.name].values.eager, estimate))

    def _is_far(self, values: LeafValues, settling: Settling | None) -> bool:
        """Whether nothing is drawn yet, and eager's error can be no measure: it is too far from what is expected, or
        other random numbers set the two apart."""
        estimate = self._reference().estimates.get(values.name)
        if estimate is None or estimate.offered:
            return False
        if settling is not None:
            return self.other_draws or not settling.is_near
        return self.other_draws or not eager_is_near(values.eager, estimate)

    @property
    def reference(self) -> Reference | None:
        """None where none was asked for: a callable was given, and nothing had to be measured."""
        return self._source if isinstance(self._source, Reference) else None

    def _reference(self) -> Reference:
        if not isinstance(self._source, Reference):
            self._source = self._source()
        return self._source

    def _measure(self, values: LeafValues) -> Leaf:
        return self._measure_against(self._reference(), values)

    def _measure_against(self, reference: Reference, values: LeafValues) -> Leaf:
        return judge_values(values.name, values.kind, values.eager, values.compiled, reference, self._limits)

    def _needs_second_run(self, leaf: Leaf) -> bool:
        """Whether to ask a second eager run: always before an accusation, else where noise may excuse too much.

        There a graph that gives the leaf again says enough.
        """
        if self._states[leaf.name].is_settled:
            return False
        if self.problem_of(leaf) is not None:
            return True
        return self._may_waver(leaf) and not self._reference().is_repeated_by_graph(leaf.name)

    def _may_waver(self, leaf: Leaf) -> bool:
        """Whether noise may excuse this leaf only because eager does not repeat itself.

        Nothing is excused where eager and compiled are both within rounding of the float64 run, nor where noise moves
        no element by much. A leaf that is zero but for noise is undecided as it is.
        """
        state = self._states[leaf.name]
        estimate = self._reference().estimates.get(leaf.name)
        if estimate is None or self._reference().kind not in WIDER:
            return True
        if not estimate.offered:
            # It was measured by eager's own error, and that was small enough for it.
            return not estimate.continuous
        if state.is_calm is not None:
            return not state.is_calm
        return not estimate.is_steady and not estimate.is_cancelled

    def _wavering(self, names: Collection[str]) -> set[str]:
        """Of some values, those of which a second eager run differs by more than rounding.

        Where it does the noise draws waver too and would excuse anything. A difference that another order of
        summation has amplified is none: the float64 run repeats.
        """
        if not names:
            return set()
        twin = self._reference().twin().items_by_name()
        again = {name: twin.get(name, ("", Item(ABSENT)))[1] for name in names}
        # Of most leaves no element differs by more.
        runs = []
        for name in names:
            state = self._states[name]
            if state.typical is not None:
                runs.append((name, state.values.eager, again[name].value, state.typical))
        repeated = same_but_for_rounding(runs)
        asked = [name for name in names if name not in repeated]
        return {name for name in asked if self._wavers(self._states[name].values, again[name])}

    def _wavers(self, values: LeafValues, again: Item) -> bool:
        """Whether a second eager run, ``again``, differs by more than rounding, and the float64 run differs too."""
        if any(True for _ in compare_items(values.name, values.kind, Item(values.eager), Item(again.value))):
            return not self._reference().repeats(values.name)
        beside_twin = replace(values, compiled=again.value)
        if leaf_without_reference(beside_twin, None) is not None:
            return False
        eager = values.eager
        if isinstance(eager, torch.Tensor) and not (eager.is_floating_point() or eager.is_complex()):
            leaf = self._measure(beside_twin)
        else:
            # by a scale made from the dtype, not by draws
            leaf = self._measure_against(Reference(Recording()), beside_twin)
        return problem(leaf, self._limits) is not None and not self._reference().repeats(values.name)
