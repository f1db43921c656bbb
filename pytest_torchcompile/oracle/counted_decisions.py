"""Counted decisions: steps that the eager run takes on numbers which it has computed from whole numbers alone.

T5 sorts distances into buckets by a logarithm: ``(log(distance / 8) / log(16) * 8).to(int64)``. For a distance of 16
that is 2, but for rounding. Eager takes the same side each time, and compiled code most often too. Noise takes either,
and the other bucket moves all that follows by a thousand times a rounding. So a wide run takes what eager has taken.

No parameter and no floating input has a part in such a number: it is no fault of theirs that a wide run would hide.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch

from pytest_torchcompile.oracle.exact_calls import has_fractions
from pytest_torchcompile.oracle.gpu_waits import tensors_in
from pytest_torchcompile.oracle.operator_rounding import Operator, wide_dtype
from pytest_torchcompile.oracle.properties import storage_address

__all__ = ["CountedDecisions", "DecisionKey", "DecisionReplay", "DecisionWatch"]

DecisionKey: TypeAlias = "tuple[Any, bool]"
"""The key of a call, and whether it is asked for another dtype than a floating one."""
# What makes whole numbers, and keeps the dtype.
_STEPS: Final = frozenset({"ceil", "floor", "round", "sign", "trunc"})
# Elements of a result that is kept.
_LARGEST: Final = 1 << 22


class CountedDecisions:
    """Those of an eager run, which is told each call of an operator in its order."""

    def __init__(self) -> None:
        self.taken: list[tuple[DecisionKey, torch.Tensor | None]] = []
        """What came of each decision on floating numbers; None where they were not counted."""
        # Addresses of memory whose numbers were computed from whole numbers alone.
        self._counted: set[int] = set()

    def note(self, about: Operator, key: Any, given: tuple[Sequence[Any], Mapping[str, Any]], out: Any,
             written: Sequence[torch.Tensor]) -> None:
        """Take a call in: its arguments, by position and by name, what it returned and what it wrote to."""
        args, kwargs = given
        fractions = list(filter(has_fractions, tensors_in((*args, *kwargs.values()))))
        counted = not about.random and all(storage_address(tensor) in self._counted for tensor in fractions)
        for tensor in (*tensors_in(out), *written):
            address = storage_address(tensor)
            if counted and address:
                self._counted.add(address)
            else:
                self._counted.discard(address)
        if fractions and _decides(about, out):
            kept = None
            if counted and out.numel() <= _LARGEST:
                kept = out.detach().clone()
            self.taken.append((_decision_key(key, kwargs), kept))

    def end(self) -> None:
        """Nothing is noted any more. Without a counted one nothing is kept."""
        self._counted = set()
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
        self.wide = wide
        self._left: dict[DecisionKey, deque[torch.Tensor | None]] = defaultdict(deque)
        for key, kept in decisions.taken:
            self._left[key].append(kept)

    def take(self, about: Operator, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """What eager has made of this call; None where that is no decision, or none that is counted."""
        left = self._left.get(_decision_key(key, kwargs))
        if not left or not any(map(has_fractions, tensors_in((*args, *kwargs.values())))):
            return None
        kept = left.popleft()
        if kept is not None and about.name in _STEPS:
            kept = kept.to(wide_dtype(kept.dtype, self.wide))
        return kept

    def see(self, out: Any) -> None:
        """What has become of the call that was asked for last."""


class DecisionWatch(DecisionReplay):
    """Has a run decide for itself, and sees whether that is what eager has decided."""

    def __init__(self, decisions: CountedDecisions, wide: torch.dtype) -> None:
        super().__init__(decisions, wide)
        self.is_other = False
        """Whether one of the decisions is another one."""
        self._by_eager: torch.Tensor | None = None

    def take(self, about: Operator, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """None: it is not replaced."""
        self._by_eager = super().take(about, key, args, kwargs)
        return None

    def see(self, out: Any) -> None:
        """Compare the two."""
        if self._by_eager is not None and not torch.equal(self._by_eager, out):
            self.is_other = True


def _decision_key(key: Any, kwargs: Mapping[str, Any]) -> DecisionKey:
    asked = kwargs.get("dtype")
    return key, asked is not None and not asked.is_floating_point and not asked.is_complex


def _decides(about: Operator, out: Any) -> bool:
    """Whether a call on floating numbers has made whole ones of them, in new memory."""
    if not isinstance(out, torch.Tensor) or about.writes:
        return False
    return about.name in _STEPS or not has_fractions(out)
