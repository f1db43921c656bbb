"""CUDA graphs at work: where a step begins, and how often each compiled graph of a step replayed one.

Replays are counted where they happen, at ``torch.cuda.CUDAGraph.replay``, through which Inductor's CUDA graph trees and
the backend ``cudagraphs`` run every graph (torch/_inductor/cudagraph_trees.py, torch 2.8 to 2.15). Torch's own counters
say only what was skipped, and where a graph is partitioned not even that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Replays", "compiled_backwards", "count_replays", "step_begins"]


@dataclass
class Replays:
    """One step: each compiled graph that ran, in order, and the replays in it."""

    graphs: list[dict[str, Any]] = field(default_factory=list)
    """``{"compile_id", "replays"}`` of each run of a compiled forward graph."""
    elsewhere: int = 0
    """Replays outside of all forward graphs: those of backward passes."""
    backwards: int = 0
    """Compiled backward passes that the step's loss leads to."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @property
    def without(self) -> list[str]:
        """Compile ids of the graphs that ran without any CUDA graph, a backward as ``backward``."""
        forwards = [graph["compile_id"] for graph in self.graphs if not graph["replays"]]
        # What replays outside of all forward graphs is a backward's; each needs at least one.
        missing = max(0, self.backwards - self.elsewhere)
        return forwards + ["backward"] * missing


def step_begins() -> None:
    """Tell CUDA graphs that nothing of the step before is needed any more, where there is a GPU in use.

    Without it they take outputs that are still held, and forwards without a backward, for parts of one long step.
    """
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def count_replays() -> Iterator[Replays]:
    """Count the replays of a block, by the compiled graph that they belong to. Nothing is compiled for it."""
    import torch

    from pytest_torchcompile.ledger import observe
    from pytest_torchcompile.ledger.process_watch import watch

    step = Replays()
    inside: list[dict[str, Any]] = []
    original = torch.cuda.CUDAGraph.replay

    def replay(self: Any) -> None:
        if inside:
            inside[-1]["replays"] += 1
        else:
            step.elsewhere += 1
        original(self)

    @contextlib.contextmanager
    def graph_marker(compile_id: str) -> Iterator[None]:
        # An empty one is that of a compile, which is no run of a graph.
        if not compile_id:
            yield
            return
        graph = {"compile_id": compile_id, "replays": 0}
        inside.append(graph)
        step.graphs.append(graph)
        try:
            yield
        finally:
            inside.pop()

    before = watch.marker
    # The marker is opened by the hooks of a ledger.
    with observe():
        watch.marker = graph_marker
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
        try:
            yield step
        finally:
            watch.marker = before
            torch.cuda.CUDAGraph.replay = original  # type: ignore[method-assign]


def compiled_backwards(loss: Any) -> int:
    """Compiled backward passes that the loss leads to: nodes ``CompiledFunctionBackward`` of its autograd graph.

    That is what AOTAutograd calls them (torch/_functorch/_aot_autograd/runtime_wrappers.py, torch 2.8 to 2.15).
    """
    seen, waiting, count = set(), [loss.grad_fn], 0
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        count += "CompiledFunction" in node.name()
        waiting += [following for following, _ in node.next_functions]
    return count
