"""Decompositions: which ATen operators AOTAutograd was told to take apart, into what, and which it kept.

A decomposition is a Python function of a table, called while the graph is traced. What it traces in turn are the nodes
that it stands for. Only the outermost counts: what decomposes further on the way was never in the user's graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_torchcompile.explain.explanation_records import TracedOperator
from pytest_torchcompile.explain.graph_texts import GraphNode, Stage
from pytest_torchcompile.ledger.torch_internals import private_name
from pytest_torchcompile.lowering.kernel_watch import compile_id_reader

__all__ = ["DecompositionNotes", "traced_operators"]


@dataclass
class _Trace:
    """One graph while it is traced."""

    compile_id: str
    graph: Any
    """Held, so that no other has its identity."""
    taken_apart: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)
    """Operator, function and the names of the nodes that it made."""


@dataclass
class DecompositionNotes:
    """What was taken apart, graph by graph."""

    traces: list[_Trace] = field(default_factory=list)
    depth: int = 0
    compile_id: Callable[[], str] = str
    """Tells what is compiled now."""

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Note decompositions while the block runs.

        ``maybe_handle_decomp(mode, operator, args, kwargs)`` in torch/fx/experimental/proxy_tensor.py (torch 2.8 to
        2.15) asks the table, and returns NotImplemented where the operator is kept.
        """
        original = private_name("torch.fx.experimental.proxy_tensor", "maybe_handle_decomp", "looks decompositions up",
                                "they can't be explained")
        self.compile_id = compile_id_reader()
        from torch.fx.experimental import proxy_tensor

        def noting(mode: Any, operator: Any, args: Any, kwargs: Any) -> Any:
            return self._note(original, mode, operator, args, kwargs)

        vars(proxy_tensor)["maybe_handle_decomp"] = noting
        try:
            yield
        finally:
            vars(proxy_tensor)["maybe_handle_decomp"] = original

    def _note(self, original: Callable[..., Any], mode: Any, operator: Any, args: Any, kwargs: Any) -> Any:
        if self.depth:
            return original(mode, operator, args, kwargs)
        graph = mode.tracer.graph
        last = next(iter(reversed(graph.nodes)), None)
        self.depth += 1
        try:
            result = original(mode, operator, args, kwargs)
        finally:
            self.depth -= 1
        if result is not NotImplemented:
            self._enter(graph, str(operator), _name_of(_table_asked(mode).get(operator)), last)
        return result

    def _enter(self, graph: Any, operator: str, by: str, last: Any) -> None:
        made = []
        for node in reversed(graph.nodes):
            if node is last:
                break
            made.append(node.name)
        if not self.traces or self.traces[-1].graph is not graph:
            self.traces.append(_Trace(self.compile_id(), graph))
        self.traces[-1].taken_apart.append((operator, by, tuple(reversed(made))))


def _table_asked(mode: Any) -> Mapping[Any, Any]:
    """The decompositions that ``maybe_handle_decomp`` asks: the tracing mode's (torch 2.13 to 2.15), or the module's.

    ``CURRENT_DECOMPOSITION_TABLE`` in torch/fx/experimental/proxy_tensor.py: torch 2.8 to 2.12. Without either, what
    takes an operator apart has no name; that it was taken apart is seen all the same.
    """
    from torch.fx.experimental import proxy_tensor

    table: Mapping[Any, Any] | None = getattr(mode, "decomposition_table", None)
    if table is None:
        table = getattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", None)
    return {} if table is None else table


def _name_of(function: Any) -> str:
    if function is None:
        # Empty would say that the operator was kept.
        return "a function that this torch does not name"
    module = getattr(function, "__module__", "")
    return f"{module}.{getattr(function, '__name__', type(function).__name__)}"


def traced_operators(notes: DecompositionNotes, stages: Iterable[Stage]) -> list[TracedOperator]:
    """Each operator of AOTAutograd's graphs as it was before decomposition, in the order of the graphs.

    :param stages: the graph with the forward and backward pass (``joint``), or, where there is none, ``forward``.
    """
    operators: list[TracedOperator] = []
    for stage in stages:
        operators += _operators_of(stage, _trace_of(stage, notes.traces))
    return operators


def _trace_of(stage: Stage, traces: Sequence[_Trace]) -> _Trace:
    """The trace that a graph came of: of those of its compile the last with the most of its nodes."""
    names = {node.name for node in stage.nodes}
    best, most = _Trace("", None), 0
    for trace in traces:
        shared = sum(name in names for _operator, _by, made in trace.taken_apart for name in made)
        if trace.compile_id == stage.compile_id and shared >= most:
            best, most = trace, shared
    return best


def _operators_of(stage: Stage, trace: _Trace) -> Iterator[TracedOperator]:
    nodes = {node.name: node for node in stage.nodes}
    group_of: dict[str, int] = {}
    for number, (_operator, _by, made) in enumerate(trace.taken_apart):
        group_of.update(dict.fromkeys(made, number))
    told: set[int] = set()
    for node in stage.nodes:
        if node.target in ("input", "expression"):
            continue
        number = group_of.get(node.name, -1)
        if number < 0:
            target = _short_target(node)
            yield TracedOperator(stage.compile_id, target, "", (target,), (node.name,), node.place)
        elif number not in told:
            told.add(number)
            operator, by, made = trace.taken_apart[number]
            # What nobody needs was dropped from the graph at its end.
            left = [nodes[name] for name in made if name in nodes and nodes[name].target != "expression"]
            yield TracedOperator(stage.compile_id, operator, by, tuple(map(_short_target, left)),
                                 tuple(node.name for node in left), node.place)


def _short_target(node: GraphNode) -> str:
    """``aten.gelu.default`` of ``torch.ops.aten.gelu.default``."""
    return node.target.removeprefix("torch.ops.")
