"""How many graphs a history of sizes explains: torch's own rules for what it compiles anew, and no more.

Seen in torch 2.8 to 2.15 (``_dynamo/variables/builder.py: record_automatic_dynamic``,
``fx/experimental/symbolic_shapes.py: create_symbol``): a size is a constant of the graph, unless ``dynamic=True`` or
it was found changed when something was compiled before; 0 and 1 stay constants; sizes that are equal when they are made
symbols share one (duck shapes). Torch may do with less: some equal sizes get symbols of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["graphs"]

Sizes = tuple[int, ...]
"""All sizes of a call's inputs, one after the other, always in the same places."""


@dataclass(frozen=True)
class _Graph:
    constants: tuple[int | None, ...]
    """The size at each place; None where any will do."""
    groups: tuple[int | None, ...]
    """Places of one symbol have one number."""

    def takes(self, sizes: Sizes) -> bool:
        if any(constant not in (None, size) for constant, size in zip(self.constants, sizes, strict=True)):
            return False
        symbols: dict[int, int] = {}
        for group, size in zip(self.groups, sizes, strict=True):
            if group is not None and (size < 2 or symbols.setdefault(group, size) != size):
                return False
        return True


def graphs(dynamic: str, history: Iterable[Sizes]) -> list[int]:
    """After each call, how many graphs of one function the sizes so far explain.

    ``dynamic`` is ``auto``, ``static`` or ``dynamic``. Calls whose inputs have another number of dimensions are
    counted apart.
    """
    made: dict[int, list[_Graph]] = {}
    recorded: dict[int, Sizes] = {}
    varied: dict[int, set[int]] = {}
    counts = []
    for sizes in history:
        kind = len(sizes)
        known = made.setdefault(kind, [])
        if not any(graph.takes(sizes) for graph in known):
            changed = varied.setdefault(kind, set())
            changed |= {k for k, (old, new) in enumerate(zip(recorded.get(kind, sizes), sizes, strict=True))
                        if old != new}
            recorded[kind] = sizes
            known.append(_made(sizes, {"auto": changed, "static": set(), "dynamic": set(range(kind))}[dynamic]))
        counts.append(sum(map(len, made.values())))
    return counts


def _made(sizes: Sizes, symbolic: set[int]) -> _Graph:
    free = [place in symbolic and size > 1 for place, size in enumerate(sizes)]
    return _Graph(
        tuple(None if any_will_do else size for any_will_do, size in zip(free, sizes, strict=True)),
        _groups(sizes, free),
    )


def _groups(sizes: Sizes, free: list[bool]) -> tuple[int | None, ...]:
    first: dict[int, int] = {}
    return tuple(first.setdefault(size, place) if any_will_do else None
                 for place, (size, any_will_do) in enumerate(zip(sizes, free, strict=True)))
