"""compare(): two recordings of one program, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from pytest_torchcompile.oracle.expected import Reference
from pytest_torchcompile.oracle.judging import OTHER_DECISIONS
from pytest_torchcompile.oracle.leaf_judge import LeafJudge
from pytest_torchcompile.oracle.leaf_limits import Leaf, Limits
from pytest_torchcompile.oracle.leaf_state import LeafValues
from pytest_torchcompile.oracle.properties import (
    ABSENT,
    compare_errors,
    compare_items,
    compare_properties,
    compare_zero_signs,
    has_other_draws,
)
from pytest_torchcompile.oracle.recording import Item, Recording

__all__ = ["compare"]


def compare(
    eager: Recording,
    compiled: Recording,
    reference: Reference | Callable[[], Reference],
    *,
    limits: Limits | None = None,
    without: Collection[str] = (),
    judged: Mapping[str, Leaf] | None = None,
) -> list[Leaf]:
    """Compare everything that two recordings hold; ``leaf_limits.problem`` says which leaves are
    wrong.

    Args:
        eager: The run to be trusted in everything but rounding.
        compiled: The run under test, from the same state, batch, seed and loss.
        reference: What values that aren't bitwise equal are measured against; a callable is called only
            when there are any, so that an exact run pays nothing.
        limits: Decide when more noise is drawn before a leaf is left looking wrong.
        without: Names of values that are not compared.
        judged: What an earlier comparison has found of the same numbers, by name: it is found again.

    Returns:
        One leaf per output, loss, changed input, buffer and gradient; one each for structure, memory sharing
        and generator; one more for every dtype, shape, stride or requires_grad that differs. If one of the
        two raised, a single leaf about that.
    """
    if eager.error is not None or compiled.error is not None:
        return [compare_errors(eager, compiled)]
    limits = limits or Limits()
    judge = LeafJudge(reference, limits, eager)
    pairs = [pair for pair in _pair_items(eager, compiled) if pair.name not in without]
    beside = found = _leaves_beside(judge, eager, compiled, pairs, judged or {})
    # Code that decides otherwise than eager where only rounding decides is judged beside what it has decided.
    own = judge.reference
    while own is not None and _accused(judge, found, pairs):
        other = own.deciding_as(compiled.values_by_name(), _accused(judge, beside, pairs))
        if other is not None:
            pairs = [pair.moved(own, other) for pair in pairs]
            beside = _leaves_beside(LeafJudge(other, limits, eager), eager, compiled, pairs, {})
            found = _right_beside(judge, found, beside)
        own = other
    return found


def _accused(judge: LeafJudge, leaves: Iterable[Leaf], pairs: Iterable[_Pair]) -> list[str]:
    """Names of the pairs' values that are wrong. Of dtypes and strides no decision on numbers says anything."""
    of_values = {(pair.name, pair.kind) for pair in pairs}
    return [leaf.name for leaf in leaves if (leaf.name, leaf.kind) in of_values and judge.problem_of(leaf)]


def _leaves_beside(judge: LeafJudge, eager: Recording, compiled: Recording, pairs: Collection[_Pair],
                   judged: Mapping[str, Leaf]) -> list[Leaf]:
    """The leaves of two recordings that have not raised, beside the one reference of the judge.

    ``pairs``: of their items; ``judged``: as for :func:`compare`.
    """
    leaves = judge.excuse_wavering(list(compare_properties(eager, compiled)),
                                   lambda twin: compare_properties(eager, twin))
    judge.other_draws = has_other_draws(leaves)
    judge.look_at(pair.values for pair in pairs)
    for pair in pairs:
        differences = list(compare_items(pair.name, pair.kind, pair.eager, pair.compiled))
        leaves += judge.excuse_wavering(differences, pair.compare_with_twin)
        if not any(leaf.kind in (pair.kind, "shape", "zero_gradient") for leaf in differences):
            leaves.append(judge.first_leaf(pair.values, judged.get(pair.name)))
        if pair.kind == "value":
            leaves += compare_zero_signs(pair.name, pair.eager.value, pair.compiled.value)
    return judge.decide(leaves)


def _right_beside(judge: LeafJudge, found: Iterable[Leaf], beside_other: Iterable[Leaf]) -> list[Leaf]:
    """The leaves found, with those of another reference in the place of problems that are none beside it.

    If there is one, that reference decides as compiled code does, and says also how wrong the others are.
    """
    other = {(leaf.name, leaf.kind): leaf for leaf in beside_other}
    wrong = [(leaf.name, leaf.kind) for leaf in found if judge.problem_of(leaf)]
    right = [other[key] for key in wrong if key in other and not judge.problem_of(other[key])]
    if not right:
        return list(found)
    told = {(leaf.name, leaf.kind): leaf for leaf in judge.with_excuses(right, OTHER_DECISIONS)}
    leaves = []
    for leaf in found:
        key = leaf.name, leaf.kind
        if key in wrong:
            leaf = told.get(key) or other.get(key, leaf)
        leaves.append(leaf)
    return leaves


@dataclass(frozen=True)
class _Pair:
    """One thing that both recordings hold; what one of them lacks is an absent value."""

    name: str
    kind: str
    eager: Item
    compiled: Item

    @property
    def values(self) -> LeafValues:
        return LeafValues(self.name, self.kind, self.eager.value, self.compiled.value)

    def moved(self, before: Reference, after: Reference) -> _Pair:
        """As it were if eager had decided as ``after`` does, not as ``before``."""
        return replace(self, eager=replace(self.eager, value=after.moved(self.name, self.eager.value, before)))

    def compare_with_twin(self, twin: Recording) -> Iterable[Leaf]:
        """What differs between eager and a second eager run."""
        item = twin.item_named(self.name)
        if item is None:
            return []
        return compare_items(self.name, self.kind, self.eager, item)


def _pair_items(eager: Recording, compiled: Recording) -> list[_Pair]:
    """In eager's order, then what only compiled has."""
    mine, theirs = eager.items_by_name(), compiled.items_by_name()
    pairs = []
    for name in {**mine, **theirs}:
        kind, _ = mine.get(name) or theirs[name]
        _, one = mine.get(name, (kind, Item(ABSENT)))
        _, other = theirs.get(name, (kind, Item(ABSENT)))
        if kind == "value" and (one.value is ABSENT or other.value is ABSENT):
            continue  # said once, about the structure
        if kind == "gradient" and eager.backward != compiled.backward:
            continue  # said once, about the loss
        pairs.append(_Pair(name, kind, one, other))
    return pairs
