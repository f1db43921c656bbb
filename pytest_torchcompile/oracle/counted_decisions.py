"""Counted decisions: steps that the eager run takes on numbers which it has computed from whole numbers alone.

T5 sorts distances into buckets by a logarithm: ``(log(distance / 8) / log(16) * 8).to(int64)``. For a distance of 16
that is 2, but for rounding. Eager takes the same side each time, and compiled code most often too. Noise takes either,
and the other bucket moves all that follows by a thousand times a rounding. So a wide run takes what eager has taken.

No parameter and no floating input has a part in such a number. So a wide run that takes it over hides no fault.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from pytest_torchcompile.oracle.exact_calls import has_fractions
from pytest_torchcompile.oracle.gpu_waits import tensors_in
from pytest_torchcompile.oracle.operator_rounding import Operator, wide_dtype
from pytest_torchcompile.oracle.properties import storage_address

__all__ = ["CountedDecisions", "DecisionKey", "DecisionReplay", "DecisionWatch", "OtherDecision"]

DecisionKey: TypeAlias = "tuple[Any, torch.dtype | None]"
"""The key of a call, and the dtype that it is asked for if that is not a floating one."""
# What is made of a number or a list in the program's text: ``torch.tensor(127.0)``.
_WRITTEN_DOWN: Final = "lift_fresh"
# What makes whole numbers, and keeps the dtype.
_STEPS: Final = frozenset({"ceil", "floor", "round", "sign", "trunc"})
# What hands a number to Python.
_HANDED_OVER: Final = "_local_scalar_dense"
# Elements of all results that are kept.
_LARGEST: Final = 1 << 22


class CountedDecisions:
    """Those of an eager run, which is told each call of an operator in its order."""

    def __init__(self) -> None:
        self.taken: list[tuple[DecisionKey, torch.Tensor | None]] = []
        """What came of each decision on floating numbers; None where they were not counted."""
        # Addresses of memory: of floating numbers that were computed from whole numbers alone, and of whole numbers
        # that were computed from others.
        self._counted: set[int] = set()
        self._uncounted: set[int] = set()
        self._is_over, self._room = False, _LARGEST

    def note(self, about: Operator, key: Any, given: tuple[Sequence[Any], Mapping[str, Any]], out: Any,
             written: Sequence[torch.Tensor]) -> None:
        """Take a call in: its arguments, by position and by name, what it returned and what it wrote to."""
        args, kwargs = given
        tensors = list(tensors_in((*args, *kwargs.values())))
        counted = not about.random and (about.name == _WRITTEN_DOWN or all(map(self._is_counted, tensors)))
        if about.name == _HANDED_OVER and not counted:
            # What Python makes of that number is not seen.
            self._is_over = True
        for tensor in (*tensors_in(out), *written):
            self._mark(tensor, counted)
        if any(map(has_fractions, tensors)) and _decides(about, out):
            kept = None
            if counted and not self._is_over and out.numel() <= self._room:
                self._room -= out.numel()
                kept = out.detach().clone()
            self.taken.append((_decision_key(key, kwargs), kept))

    def _is_counted(self, tensor: torch.Tensor) -> bool:
        if has_fractions(tensor):
            return storage_address(tensor) in self._counted
        return storage_address(tensor) not in self._uncounted

    def _mark(self, tensor: torch.Tensor, counted: bool) -> None:
        """Memory may have been another tensor's before."""
        address = storage_address(tensor)
        self._counted.discard(address)
        self._uncounted.discard(address)
        if counted and address and has_fractions(tensor):
            self._counted.add(address)
        elif not counted and not has_fractions(tensor):
            self._uncounted.add(address)

    def changed(self, results: Mapping[int, torch.Tensor]) -> CountedDecisions:
        """The same, but for some results by their numbers."""
        others = CountedDecisions()
        for number, (key, kept) in enumerate(self.taken):
            others.taken.append((key, results.get(number, kept)))
        return others

    def end(self) -> None:
        """Nothing is noted any more. Without a counted one nothing is kept."""
        self._counted, self._uncounted = set(), set()
        if all(kept is None for _, kept in self.taken):
            self.taken = []

    def held_tensors(self) -> Iterator[torch.Tensor]:
        """What is kept."""
        for _, kept in self.taken:
            if kept is not None:
                yield kept


class DecisionReplay:
    """Hands them out again to a run in ``wide``, to each call those of the same key, in their order."""

    def __init__(self, decisions: CountedDecisions, wide: torch.dtype) -> None:
        self.decisions, self.wide = decisions, wide
        # The numbers of those that are left.
        self._left: dict[DecisionKey, deque[int]] = defaultdict(deque)
        for number, (key, _) in enumerate(decisions.taken):
            self._left[key].append(number)
        self.operators = {name for ((name, _), _), _ in decisions.taken}
        """Names of the operators that may decide."""

    @property
    def is_used_up(self) -> bool:
        """Whether each that was counted has been handed out."""
        left = [self.decisions.taken[number][1] for numbers in self._left.values() for number in numbers]
        return all(kept is None for kept in left)

    def take(self, about: Operator, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """What takes the place of the result of this call; None where that is no decision, or none that is counted."""
        number = self._number_of(key, args, kwargs)
        if number is None:
            return None
        _, kept = self.decisions.taken[number]
        if kept is not None and about.name in _STEPS:
            kept = kept.to(wide_dtype(kept.dtype, self.wide))
        return kept

    def see(self, args: Sequence[Any], out: Any) -> None:
        """What the call was given that was asked for last, and what has become of it."""

    def _number_of(self, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
        left = self._left.get(_decision_key(key, kwargs))
        if not left or not any(map(has_fractions, tensors_in((*args, *kwargs.values())))):
            return None
        return left.popleft()


@dataclass(frozen=True)
class OtherDecision:
    """What a run has decided otherwise than eager, in some elements."""

    number: int
    """Of the decision, among those that eager has taken."""
    given: torch.Tensor | None
    """What it decides about: of the same shape; None where that is more than one tensor."""
    result: torch.Tensor


class DecisionWatch(DecisionReplay):
    """Has a run decide for itself, and sees where it decides otherwise than eager."""

    def __init__(self, decisions: CountedDecisions, wide: torch.dtype) -> None:
        super().__init__(decisions, wide)
        self.others: list[OtherDecision] = []
        self._number: int | None = None

    def take(self, about: Operator, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Nothing is replaced."""
        self._number = self._number_of(key, args, kwargs)

    def see(self, args: Sequence[Any], out: Any) -> None:
        """Compare the result to that of eager."""
        if self._number is None:
            return
        _, kept = self.decisions.taken[self._number]
        if kept is None or torch.equal(kept.to(out.dtype), out):
            return
        given = None
        fractions = list(filter(has_fractions, tensors_in(tuple(args))))
        if len(fractions) == 1 and fractions[0].shape == out.shape:
            given = fractions[0].detach().clone()
        self.others.append(OtherDecision(self._number, given, out.detach().clone().to(kept.dtype)))


def _decision_key(key: Any, kwargs: Mapping[str, Any]) -> DecisionKey:
    asked = kwargs.get("dtype")
    if asked is not None and (asked.is_floating_point or asked.is_complex):
        asked = None
    return key, asked


def _decides(about: Operator, out: Any) -> bool:
    """Whether a call on floating numbers has made whole ones of them, in new memory: ``floor_`` is left alone."""
    if not isinstance(out, torch.Tensor) or about.writes or about.fresh != (True,):
        return False
    return about.name in _STEPS or not has_fractions(out)
