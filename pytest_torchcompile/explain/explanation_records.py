"""What an explanation consists of beside kernels: operators, bytecode, runs of graphs. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Bytecode", "GraphRun", "PassChange", "TracedOperator"]


@dataclass(frozen=True)
class TracedOperator:
    """One operator as it was before decomposition."""

    compile_id: str
    operator: str
    """``aten.gelu.default``"""
    by: str = ""
    """The function that took it apart; empty for an operator that was kept."""
    into: tuple[str, ...] = ()
    """Operators that stand for it, in order; the operator itself where it was kept."""
    nodes: tuple[str, ...] = ()
    """Their nodes."""
    place: str = ""
    """``file:line`` of the user's code."""


@dataclass
class GraphRun:
    """The first run of one graph; tensors are copies."""

    compile_id: str
    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    ran: bool = False


@dataclass(frozen=True)
class Bytecode:
    """What Dynamo made of the bytecode of a function."""

    compile_id: str
    function: str
    file: str
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class PassChange:
    """What a graph pass of the toolkit did to one graph."""

    stem: str
    """``joint-1.2-fold``: the graph, the pass's number, and its name."""
    before: str
    after: str
    """The code of the graph, as text."""
    diff: str
    """Empty where nothing was changed."""

    @property
    def told(self) -> str:
        """``+3 -6``, or that it changed nothing."""
        if not self.diff:
            return "changed nothing"
        added, removed = self.lines
        return f"+{added} -{removed}"

    @property
    def lines(self) -> tuple[int, int]:
        """How many lines of code it added, and how many it took away."""
        changed = [line for line in self.diff.splitlines() if line[:3] not in ("---", "+++")]
        return sum(line.startswith("+") for line in changed), sum(line.startswith("-") for line in changed)
