"""compare(): two recordings of one program, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from pytest_torchcompile.oracle.estimate import small_to_cpu
from pytest_torchcompile.oracle.expected import FAR, Reference, distance_from_runs
from pytest_torchcompile.oracle.judging import eager_is_near, judge_discrete, judge_numbers
from pytest_torchcompile.oracle.leaf import Leaf
from pytest_torchcompile.oracle.limits import Limits, problem
from pytest_torchcompile.oracle.properties import ABSENT, compare_errors, compare_items, compare_properties, plain_value
from pytest_torchcompile.oracle.recording import Item, Recording
from pytest_torchcompile.oracle.reference_runs import FEW
from pytest_torchcompile.oracle.training import role_of
from pytest_torchcompile.state.tensor_values import same_bits

__all__ = ["compare"]

_WAVERS = (
    "two eager runs from one state and seed differ by more than rounding, "
    "so nothing can be said about the compiled one"
)


def compare(
    eager: Recording,
    compiled: Recording,
    reference: Reference | Callable[[], Reference],
    *,
    limits: Limits | None = None,
) -> list[Leaf]:
    """Compare everything that two recordings hold; ``limits.problem`` says which leaves are wrong.

    Args:
        eager: The run to be trusted in everything but rounding.
        compiled: The run under test, from the same state, batch, seed and loss.
        reference: What values that aren't bitwise equal are measured against; a callable is called only
            when there are any, so that an exact run pays nothing.
        limits: Decide when more noise is drawn before a leaf is left looking wrong.

    Returns:
        One leaf per output, loss, changed input, buffer and gradient; one each for structure, memory sharing
        and generator; one more for every dtype, shape, stride or requires_grad that differs. If one of the
        two raised, a single leaf about that.
    """
    if eager.error is not None or compiled.error is not None:
        return [compare_errors(eager, compiled)]
    values = _Values(reference, limits or Limits())
    leaves = values.settled(list(compare_properties(eager, compiled)), lambda twin: compare_properties(eager, twin))
    for name, (kind, mine, found) in _pairs(eager, compiled).items():
        differ = list(compare_items(name, kind, mine, found))
        leaves += values.settled(differ, lambda twin, n=name, k=kind, m=mine: _differ(n, k, m, twin))  # type: ignore[misc]
        if not any(leaf.kind in (kind, "shape", "zero_gradient") for leaf in differ):
            leaves.append(values.first(name, kind, mine.value, found.value))
    return values.decided(leaves)


class _Values:
    """Judges values: bitwise, then by the reference, then by more draws, then beside a second eager run."""

    def __init__(self, reference: Reference | Callable[[], Reference], limits: Limits) -> None:
        self._source, self._limits = reference, limits
        self._without_draws = replace(limits, rms=limits.rms / 2, bias=limits.bias / 2, peak=limits.peak / 2)
        """What a leaf must hold that no noise is drawn for: eager's own error is one measure of it, and a rough one."""
        self._twin: dict[str, tuple[str, Item]] | None = None
        self._measured: dict[str, tuple[str, Any, Any]] = {}
        """Kind, eager's value and the compiled one of the leaves that are not equal bit for bit."""

    def first(self, name: str, kind: str, mine: Any, found: Any) -> Leaf:
        """Judge a value by the draws that there are: none at first, then by eager's own error."""
        leaf = self._without_reference(name, kind, mine, found)
        if leaf is not None:
            return leaf
        self._measured[name] = (kind, mine, found)
        return self._judged(name, kind, mine, found)

    def decided(self, leaves: list[Leaf]) -> list[Leaf]:
        """Draw noise for the leaves that are still suspicious, until none is, or all draws are made."""
        at = {leaf.name: i for i, leaf in enumerate(leaves) if self._measured.get(leaf.name, ("",))[0] == leaf.kind}
        left = [name for name, i in at.items() if self._suspicious(leaves[i])]
        while left and self._reference().more(left):
            for name in left:
                leaves[at[name]] = self._judged(name, *self._measured[name])
            left = [name for name in left if self._suspicious(leaves[at[name]])]
        for name, i in at.items():
            kind, mine, found = self._measured[name]
            if self._wavers(name, kind, mine):
                leaves[i] = self._wavering(leaves[i], mine, found)
        return leaves

    def _wavering(self, leaf: Leaf, mine: Any, found: Any) -> Leaf:
        """Undecidable, unless compiled is far outside of what eager's own runs differ by."""
        runs = [again.value for twin in self._reference().twins() if (again := _item(twin, leaf.name)) is not None]
        far = distance_from_runs(found, [mine, *runs])
        if far <= FAR:
            return replace(leaf, kind="nondeterministic", message=_WAVERS)
        text = f"is {far:.3g} times as far from the nearest of {len(runs) + 1} eager runs as these are apart"
        return replace(leaf, message=f"{text} (limit {FAR:g}; eager does not repeat itself)")

    def settled(self, leaves: list[Leaf], again: Callable[[Recording], Iterable[Leaf]]) -> list[Leaf]:
        """Leaves about properties, where ``again`` compares eager with a second eager run: what differs there too is
        nobody's fault but the model's."""
        if not any(problem(leaf, self._limits) for leaf in leaves):
            return leaves
        wavers = {(leaf.name, leaf.kind) for leaf in again(self._reference().twin()) if leaf.message}
        return [
            replace(leaf, kind="nondeterministic", message=_WAVERS) if (leaf.name, leaf.kind) in wavers else leaf
            for leaf in leaves
        ]

    def _suspicious(self, leaf: Leaf) -> bool:
        """Whether more draws may say something else: of a problem, or of what a few draws cannot decide."""
        if problem(leaf, self._limits) is not None:
            return True
        estimate = self._reference().estimates.get(leaf.name)
        if estimate is None or estimate.offered >= FEW:
            return False
        if not estimate.offered and problem(leaf, self._without_draws) is not None:
            return True
        undecided = bool(leaf.undecidable) or not leaf.decided
        if estimate.offered:
            return undecided and not estimate.drowned
        return undecided or not eager_is_near(self._measured[leaf.name][1], estimate)

    def _reference(self) -> Reference:
        if not isinstance(self._source, Reference):
            self._source = self._source()
        return self._source

    def _without_reference(self, name: str, kind: str, mine: Any, found: Any) -> Leaf | None:
        if isinstance(mine, torch.Tensor):
            if same_bits(mine, found.to(mine.dtype)):
                return Leaf(name, kind, numel=mine.numel(), bitwise=True, dtype=_name(mine.dtype))
            return None
        if _equal(mine, found):
            return Leaf(name, kind, numel=0 if mine is None else 1, bitwise=True)
        if isinstance(mine, (float, complex)):
            return None
        return Leaf(
            name, kind, eager=plain_value(mine), compiled=plain_value(found),
            message=f"is {plain_value(mine)} in eager, {plain_value(found)} compiled",
        )  # fmt: skip

    def _judged(self, name: str, kind: str, mine: Any, found: Any) -> Leaf:
        return _against(self._reference(), Leaf(name, kind), mine, found, self._limits)

    def _wavers(self, name: str, kind: str, mine: Any) -> bool:
        """Whether a second eager run differs by more than rounding.

        Where it does the noise draws waver too and would excuse anything. A difference that another order of
        summation has amplified is none: the float64 run repeats.
        """
        if self._twin is None:
            self._twin = _items(self._reference().twin())
        again = self._twin.get(name, ("", Item(ABSENT)))[1].value
        if any(True for _ in compare_items(name, kind, Item(mine), Item(again))):
            return not self._reference().repeats(name)
        if self._without_reference(name, kind, mine, again) is not None:
            return False
        if isinstance(mine, torch.Tensor) and not (mine.is_floating_point() or mine.is_complex()):
            leaf = self._judged(name, kind, mine, again)
        else:
            # by a scale made from the dtype, not by draws
            leaf = _against(Reference(Recording()), Leaf(name, kind), mine, again, self._limits)
        return problem(leaf, self._limits) is not None and not self._reference().repeats(name)


def _differ(name: str, kind: str, mine: Item, twin: Recording) -> Iterable[Leaf]:
    again = _items(twin).get(name)
    return [] if again is None else compare_items(name, kind, mine, again[1])


def _against(reference: Reference, leaf: Leaf, mine: Any, found: Any, limits: Limits) -> Leaf:
    if isinstance(mine, (float, complex)):
        dtype = torch.float64 if isinstance(mine, float) else torch.complex128
        mine, found = (torch.tensor(v, dtype=dtype) for v in (mine, found))
    mine, found = small_to_cpu(mine), small_to_cpu(found)
    leaf = replace(leaf, numel=mine.numel(), dtype=_name(mine.dtype))
    if mine.is_floating_point() or mine.is_complex():
        return judge_numbers(leaf, mine, found.to(mine.dtype), reference, limits)
    return judge_discrete(leaf, mine, found.to(mine.dtype), reference)


def _pairs(eager: Recording, compiled: Recording) -> dict[str, tuple[str, Item, Item]]:
    """``name: (kind, eager, compiled)`` in eager's order; what one lacks is paired with an absent value."""
    mine, found = _items(eager), _items(compiled)
    pairs = {}
    for name in [*mine, *(n for n in found if n not in mine)]:
        kind = (mine.get(name) or found[name])[0]
        one, other = (items.get(name, (kind, Item(ABSENT)))[1] for items in (mine, found))
        if kind == "value" and (one.value is ABSENT or other.value is ABSENT):
            continue  # said once, about the structure
        if kind == "gradient" and eager.backward != compiled.backward:
            continue  # said once, about the loss
        pairs[name] = (kind, one, other)
    return pairs


def _item(recording: Recording, name: str) -> Item | None:
    found = _items(recording).get(name)
    return None if found is None else found[1]


def _items(recording: Recording) -> dict[str, tuple[str, Item]]:
    return {name: (role_of(name, kind), item) for name, kind, item in recording.items()}


def _equal(mine: Any, found: Any) -> bool:
    if mine is found or (isinstance(mine, float) and mine != mine and found != found):
        return True
    if type(mine) is type(found) and not any("__eq__" in vars(kind) for kind in type(mine).__mro__[:-1]):
        return True  # plain objects are equal only to themselves: their type is all that can be compared
    try:
        return bool(mine == found)
    except Exception:  # objects that refuse to be compared are told apart by their text
        return repr(mine) == repr(found)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
