"""CellScheduling: a cell's items stay on one xdist worker, and the longest cells start first.

In a first run nobody knows how long a cell takes, and nothing is compiled yet. Then a worker stays with the cells of
one model: they share graphs and kernels, which two workers would compile at the same time.

Later runs know which cells have shared a graph. The first of these that starts is the leader. The others wait for it
while there is anything else to run, and find the graph in the cache: the sources may be others, or the cache be empty.
A worker for which only such cells are left waits, as long as another one is at work.

xdist's own ``loadgroup`` does not group on pytest 9.2 with xdist 3.8 (pytest-dev/pytest-xdist#1386; docs/upstream
has a patch), and its ``load`` hands the two longest tests to the same worker. Derives from ``LoadScheduling``, whose
internals are not a stable API: seen in pytest-xdist 3.6 to 3.8.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xdist.scheduler.load import LoadScheduling  # type: ignore[import-untyped]  # it has no py.typed

from pytest_torchcompile.plan.matrix_path import names_matrix

if TYPE_CHECKING:
    import pytest

    from pytest_torchcompile.plan.expansion import PlannedCell

__all__ = ["CellScheduling", "cell_families", "cell_units"]


def cell_families(planned: Iterable[PlannedCell]) -> dict[str, str]:
    """Cell id to what cells with the same graphs have in common: the model, and what its tensors are."""
    families = {}
    for each in planned:
        cell = each.cell
        families[cell.id] = "-".join(map(str, (cell.model, cell.dtype, cell.device, cell.phase, cell.user)))
    return families


def cell_units(collection: Sequence[str], seconds: Mapping[str, float]) -> list[list[int]]:
    """Indices of the items that belong together, the longest unit first.

    Items of one cell (``file.yaml::cell::check``, ``shipped:name::cell::check``) are a unit, any other item is one
    of its own. A cell that was never timed counts as long as the longest known: it is better to start it too early.
    """
    units: dict[str, list[int]] = {}
    for index, nodeid in enumerate(collection):
        cell = _cell_of(nodeid)
        key = nodeid
        if cell:
            # With the file: two matrices may have a cell of one name.
            key = f"{nodeid.partition('::')[0]}::{cell}"
        units.setdefault(key, []).append(index)
    unknown = max(seconds.values(), default=0.0)

    def known_cost(key: str) -> float:
        cell = _cell_of(key)
        if not cell:
            return 0.0
        return seconds.get(cell, unknown)

    # The sort is stable: equal costs keep their order, also in reverse.
    return [units[key] for key in sorted(units, key=known_cost, reverse=True)]


def _cell_of(nodeid: str) -> str:
    """The cell that an item is of; empty for what is no cell's."""
    file, *names = nodeid.split("::")
    if not names or not names_matrix(file):
        return ""
    return names[0]


class CellScheduling(LoadScheduling):  # type: ignore[misc]  # its base is untyped
    """Sends whole units; a worker always knows one item beyond the one it runs, as xdist demands."""

    def __init__(self, config: pytest.Config, log: Any, seconds: Mapping[str, float],
                 families: Mapping[str, str], graphs: Mapping[str, Collection[str]]) -> None:
        super().__init__(config, log)
        self.collection: list[str] | None = None
        self._seconds = seconds
        self._families = families
        self._at: dict[Any, str] = {}
        """The family of the cell that each worker was last sent."""
        self._graphs = {cell: frozenset(shared) for cell, shared in graphs.items()}
        self._begun: dict[Any, dict[int, frozenset[str]]] = {}
        """For each worker the first items of cells that are not run yet, and the graphs that the cell shares."""
        self._in_cache: frozenset[str] = frozenset()
        """The graphs of cells that have run."""
        self._units: deque[list[int]] = deque()

    def schedule(self) -> None:
        """Give every worker its first unit once all have collected the same items."""
        if self.collection is not None:
            for node in self.nodes:
                self.check_schedule(node)
            return
        # Items go by their index, so that every worker must have the same list.
        if not self._check_nodes_have_same_collection():
            self.log("**Different tests collected, aborting run**")
            return
        items: list[str] = next(iter(self.node2collection.values()))
        self.collection = items
        self._units.extend(cell_units(items, self._seconds))
        self._mirror_pending()
        for node in self.nodes:
            self.check_schedule(node)

    def check_schedule(self, node: Any, duration: float = 0) -> None:
        """Send units until the worker has an item to run and one to know of; shut it down when none is left."""
        if node.shutting_down:
            return
        while self._units and len(self.node2pending[node]) < 2:
            unit = self._next_unit(node)
            if unit is None:
                break
            self._units.remove(unit)
            self._begun.setdefault(node, {})[unit[0]] = self._shared_graphs(unit)
            self.node2pending[node].extend(unit)
            node.send_runtest_some(unit)
        self._mirror_pending()
        if not self._units:
            node.shutdown()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """The first item of a cell has run the whole cell: what it compiled is in the cache for those that wait."""
        self._in_cache |= self._begun.get(node, {}).pop(item_index, frozenset())
        super().mark_test_complete(node, item_index, duration)
        # Those that wait; when nothing is left they are to be told so.
        for other in self.nodes:
            if other is not node and len(self.node2pending[other]) < 2:
                self.check_schedule(other)

    def _next_unit(self, node: Any) -> list[int] | None:
        """Take the longest unit; of cells that were never timed, one that shares graphs with the worker's last.

        None where the worker had better wait for what another one compiles.
        """
        busy = self._busy_graphs(node)
        units = [unit for unit in self._units if busy.isdisjoint(self._shared_graphs(unit))]
        if not units:
            if self._is_any_at_work(node):
                return None
            units = list(self._units)
        untimed = [unit for unit in units if self._untimed_family(unit)]
        unit = units[0]
        if unit in untimed:
            unit = self._share_graphs(node, untimed)
            self._at[node] = self._untimed_family(unit)
        return unit

    def _busy_graphs(self, node: Any) -> set[str]:
        """The graphs that other workers compile now, or are about to."""
        busy: set[str] = set()
        for other, cells in self._begun.items():
            if other is not node:
                busy.update(*cells.values())
        return busy - self._in_cache

    def _is_any_at_work(self, node: Any) -> bool:
        """Will another worker end an item, and so have this one looked after again?"""
        # A worker runs its last item only when it knows the next one, or that there is none.
        return any(len(pending) > 1 for other, pending in self.node2pending.items() if other is not node)

    def _shared_graphs(self, unit: list[int]) -> frozenset[str]:
        """The graphs that the cell of a unit has shared with others in an earlier run."""
        if self.collection is None:
            return frozenset()
        return self._graphs.get(_cell_of(self.collection[unit[0]]), frozenset())

    def _share_graphs(self, node: Any, untimed: list[list[int]]) -> list[int]:
        """A unit of the worker's family; else one of a family that no other worker is at; else the last one."""
        busy: set[str] = set()
        for other, family in self._at.items():
            if other is not node and other in self.node2pending:
                busy.add(family)
        free: list[int] | None = None
        for unit in untimed:
            family = self._untimed_family(unit)
            if family == self._at.get(node):
                return unit
            if free is None and family not in busy:
                free = unit
        # Where every family is at work somewhere, the last unit: whoever works on it comes from the other end.
        return free or untimed[-1]

    def _untimed_family(self, unit: list[int]) -> str:
        """The family of a unit that was never timed; empty for a timed one, and for what is no cell."""
        if self.collection is None:
            return ""
        cell = _cell_of(self.collection[unit[0]])
        if not cell or cell in self._seconds:
            return ""
        return self._families.get(cell, "")

    def mark_test_pending(self, item: str) -> None:
        """Run an item again (asked for by plugins that re-run tests)."""
        if self.collection is not None:
            self._give_back([self.collection.index(item)])

    def remove_node(self, node: Any) -> str | None:
        """A worker is gone: what it had not run goes back, first in the queue. Returns the item it was running."""
        pending = self.node2pending.pop(node)
        self._at.pop(node, None)
        self._begun.pop(node, None)
        if not pending or self.collection is None:
            return None
        running: int = pending.pop(0)
        self._give_back(pending)
        return self.collection[running]

    def _give_back(self, indices: list[int]) -> None:
        if indices:
            self._units.appendleft(indices)
        self._mirror_pending()
        for node in self.nodes:
            self.check_schedule(node)

    def _mirror_pending(self) -> None:
        """The base class asks ``pending`` whether the run is over."""
        self.pending[:] = itertools.chain.from_iterable(self._units)
