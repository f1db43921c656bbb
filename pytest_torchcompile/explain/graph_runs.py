"""Graphs as they first ran: what Dynamo's graph was given and what came of it, for a file that runs it again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_torchcompile.explain.explanation_records import GraphRun
from pytest_torchcompile.ledger.torch_internals import private_name
from pytest_torchcompile.lowering.kernel_watch import compile_id_reader

__all__ = ["GraphRuns"]


@dataclass
class GraphRuns:
    """The first run of each graph, in the order of their compiles."""

    runs: list[GraphRun] = field(default_factory=list)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Note runs while the block runs.

        ``OutputGraph.call_user_compiler(graph, inputs)`` in torch/_dynamo/output_graph.py returns what the backend
        made of a graph: torch 2.13.
        """
        original = private_name("torch._dynamo.output_graph", "OutputGraph.call_user_compiler",
                                "hands a graph to the backend", "runnable files can't be written")
        compile_id = compile_id_reader()
        from torch._dynamo.output_graph import OutputGraph

        @functools.wraps(original)
        def compile_graph(self: Any, *args: Any, **kwargs: Any) -> Any:
            return noting(original(self, *args, **kwargs))

        def noting(compiled: Callable[..., Any]) -> Callable[..., Any]:
            run = GraphRun(compile_id())
            self.runs.append(run)

            @functools.wraps(compiled)
            def call(*inputs: Any) -> Any:
                if run.ran:
                    return compiled(*inputs)
                run.ran, run.inputs = True, _copies(inputs)
                outputs = compiled(*inputs)
                run.outputs = _copies(tuple(outputs))
                return outputs

            return call

        OutputGraph.call_user_compiler = compile_graph  # type: ignore[method-assign]
        try:
            yield
        finally:
            OutputGraph.call_user_compiler = original  # type: ignore[method-assign]


def _copies(values: tuple[Any, ...]) -> tuple[Any, ...]:
    copies = []
    for value in values:
        copies.append(value.detach().clone() if isinstance(value, torch.Tensor) else value)
    return tuple(copies)
