"""How many graphs a history of sizes explains: torch's own rules for what it compiles anew, and no more.

Seen in torch 2.8 to 2.15 (``_dynamo/variables/builder.py: record_automatic_dynamic``,
``fx/experimental/symbolic_shapes.py: create_symbol``): a size is a constant of the graph, unless ``dynamic=True`` or
it was found changed when something was compiled before; 0 and 1 stay constants; sizes that are equal when they are made
symbols share one (duck shapes). Torch may do with less: some equal sizes get symbols of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["explained_graphs"]

Sizes = tuple[int, ...]
"""All sizes of a call's inputs, one after the other, always in the same places."""


@dataclass(frozen=True)
class _Graph:
    constants: tuple[int | None, ...]
    """The size at each place; None where any will do."""
    groups: tuple[int | None, ...]
    """Places of one symbol have one number."""

    def accepts(self, sizes: Sizes) -> bool:
        """Whether its guards hold for these sizes."""
        symbols: dict[int, int] = {}
        for constant, group, size in zip(self.constants, self.groups, sizes, strict=True):
            if constant not in (None, size):
                return False
            if group is not None and (size < 2 or symbols.setdefault(group, size) != size):
                return False
        return True


def explained_graphs(dynamic: str, history: Iterable[Sizes]) -> list[int]:
    """After each call, how many graphs of one function the sizes so far explain.

    ``dynamic`` is ``auto``, ``static`` or ``dynamic``. Calls whose inputs have another number of dimensions are
    counted apart.
    """
    made: dict[int, list[_Graph]] = {}
    recorded: dict[int, Sizes] = {}
    varied: dict[int, set[int]] = {}
    counts = []
    for sizes in history:
        # Another number of sizes stands for inputs of other ranks, which are guarded on by themselves.
        kind = len(sizes)
        known = made.setdefault(kind, [])
        if not any(graph.accepts(sizes) for graph in known):
            changed = varied.setdefault(kind, set())
            # Only what differs when something is compiled counts: torch compares with the sizes of the last compile.
            for place, (old, new) in enumerate(zip(recorded.get(kind, sizes), sizes, strict=True)):
                if old != new:
                    changed.add(place)
            recorded[kind] = sizes
            symbolic = {"auto": changed, "static": set(), "dynamic": set(range(kind))}[dynamic]
            known.append(_new_graph(sizes, symbolic))
        counts.append(sum(map(len, made.values())))
    return counts


def _new_graph(sizes: Sizes, symbolic: set[int]) -> _Graph:
    constants: list[int | None] = []
    groups: list[int | None] = []
    # Sizes that are equal when they become symbols share one.
    first: dict[int, int] = {}
    for place, size in enumerate(sizes):
        if place in symbolic and size > 1:
            constants.append(None)
            groups.append(first.setdefault(size, place))
        else:
            constants.append(size)
            groups.append(None)
    return _Graph(tuple(constants), tuple(groups))
