"""Told: what the causes have said already, so that no demand and no difference says it once more."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_torchcompile.gate.baseline import Change
from pytest_torchcompile.report.causes import Cause

__all__ = ["Told"]


class Told:
    """The causes of a run, by cell. Each of them fails the gate, so what they have told changes no exit code."""

    def __init__(self, causes: Iterable[Cause]) -> None:
        self._by_cell: dict[str, list[Cause]] = {}
        for cause in causes:
            for cell in cause.cells:
                self._by_cell.setdefault(cell, []).append(cause)

    def check(self, cell: str, check: str) -> Cause | None:
        """The cause that says why the check of the cell fails."""
        return next((cause for cause in self._by_cell.get(cell, ())
                     if check in cause.checks or check in cause.consequences), None)

    def gate(self, name: str, cells: Iterable[str]) -> bool:
        """Is it told why each of the cells keeps the gate from passing? The causes then name the gate."""
        found = [self.check(cell, name) for cell in cells]
        if not found or None in found:
            return False
        for cause in found:
            if cause is not None and name not in cause.gates:
                cause.gates.append(name)
        return True

    def change(self, change: Change) -> bool:
        """Is it told of each cell that it is worse than in the baseline, and why?"""
        if change.kind == "failures":
            return all(self.check(cell, change.check) for cell in change.cells)
        if change.kind == "graph_breaks":
            return all(self._at(cell, change.file, change.line) for cell in change.cells)
        if change.kind == "recompiles":
            return all(self._recompiles(cell, change) for cell in change.cells)
        return False

    def _at(self, cell: str, file: str, line: int) -> bool:
        return any((cause.problem.file, cause.problem.line) == (file, line) for cause in self._by_cell.get(cell, ()))

    def _recompiles(self, cell: str, change: Change) -> bool:
        """By a cause at its function; or it follows from a new graph break, after which the rest compiles apart."""
        if self._at(cell, change.file, change.line):
            return True
        broken = any(cause.new and "graph_breaks" in cause.checks for cause in self._by_cell.get(cell, ()))
        return broken and self.check(cell, "recompiles") is None
