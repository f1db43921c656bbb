"""A drawn call: the sizes that a batch is made for, and whether the model trains. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["DrawnCall", "Sequence", "call", "code", "from_plain", "plain"]


@dataclass(frozen=True, slots=True)
class DrawnCall:
    """One call of a sequence."""

    sizes: tuple[tuple[str, int], ...]
    """Every dim and its size, in the order of the dims."""
    training: bool | None = None
    """Switched to training mode or to evaluation; None: as it is."""

    def __repr__(self) -> str:
        """``call(B=2, S=17)``: the code that makes it."""
        flip = () if self.training is None else (f"training={self.training}",)
        return f"call({', '.join((*(f'{name}={size}' for name, size in self.sizes), *flip))})"


Sequence = tuple[DrawnCall, ...]


def call(*, training: bool | None = None, **sizes: int) -> DrawnCall:
    """A call by hand, for an ``@example``: ``call(B=2, S=17)``."""
    return DrawnCall(tuple(sizes.items()), training)


def code(sequence: Iterable[DrawnCall]) -> str:
    """A sequence as code to paste: ``[call(B=2), call(B=3)]``."""
    return f"[{', '.join(map(repr, sequence))}]"


def plain(sequence: Iterable[DrawnCall]) -> list[dict[str, Any]]:
    """A sequence as JSON-able data."""
    return [{"sizes": dict(each.sizes), "training": each.training} for each in sequence]


def from_plain(data: Iterable[Mapping[str, Any]]) -> Sequence:
    """The sequence that :func:`plain` wrote."""
    return tuple(DrawnCall(tuple(each["sizes"].items()), each["training"]) for each in data)
