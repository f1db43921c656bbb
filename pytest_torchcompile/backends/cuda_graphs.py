"""The pass ``cuda_graphs``: a graph is recorded once as a CUDA graph, and replayed from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.state.random_operators import node_draws

__all__ = ["cuda_graphs"]

_WARM_UPS: Final = 3
"""Runs before a recording, as torch.cuda.make_graphed_callables has them: libraries take their memory then."""


def cuda_graphs(module: fx.GraphModule) -> Callable[..., Any]:
    """What runs a forward or a backward graph as a CUDA graph; the last pass, with ``compiler: none``.

    Inputs are copied into the recording's own memory, but for parameters and buffers that are still where they were.
    Results are copies: the next replay leaves them alone.

    Raises:
        UsageError: for a graph that is not on a GPU, has sizes that vary, or draws random numbers.
    """
    _refuse(module)
    stays = [_is_state(node) for node in module.graph.find_nodes(op="placeholder")]
    recording: _Recording | None = None

    def run(*inputs: Any) -> Any:
        nonlocal recording
        if recording is None or not recording.fits(inputs):
            recording = _Recording(module, inputs, stays)
        return recording.replay(inputs)

    return run


cuda_graphs.needs_device = "cuda"  # type: ignore[attr-defined]
cuda_graphs.returns_runner = True  # type: ignore[attr-defined]


def _refuse(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node_draws(node):
            raise UsageError(f"cuda_graphs replays what was recorded, and {node.target} of this graph draws random "
                             "numbers anew in each call; leave the pass out for this model")
        if node.op != "placeholder":
            continue
        if isinstance(value, torch.SymInt):
            raise UsageError(f"cuda_graphs records one set of sizes, and {node.name} of this graph is a size that "
                             "varies; write `dynamic: static`")
        if isinstance(value, torch.Tensor) and value.device.type != "cuda":
            raise UsageError(f"cuda_graphs records what runs on a GPU, and {node.name} of this graph is on "
                             f"{value.device.type}; write `device: cuda`, or leave the pass out")


def _is_state(node: fx.Node) -> bool:
    """Whether an input is a parameter or a buffer, which stays where it is between calls."""
    from torch._functorch._aot_autograd.descriptors import BufferAOTInput, ParamAOTInput

    described = node.meta.get("desc")
    # Of a DTensor it is a part of one.
    return isinstance(getattr(described, "base", described), (BufferAOTInput, ParamAOTInput))


class _Recording:
    """A CUDA graph with the tensors that it reads and writes."""

    def __init__(self, module: fx.GraphModule, inputs: tuple[Any, ...], stays: list[bool]) -> None:
        self._stays = stays
        self._inputs = []
        for value, is_state in zip(inputs, stays, strict=True):
            copied = isinstance(value, torch.Tensor) and not is_state
            self._inputs.append(value.clone() if copied else value)
        self._graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(here)
        with torch.no_grad(), torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                module(*self._inputs)
        here.wait_stream(aside)
        with torch.no_grad(), torch.cuda.graph(self._graph):
            self._results = module(*self._inputs)

    def fits(self, inputs: tuple[Any, ...]) -> bool:
        """Whether parameters and buffers are where they were when it was recorded."""
        for value, recorded, is_state in zip(inputs, self._inputs, self._stays, strict=True):
            if is_state and value.data_ptr() != recorded.data_ptr():
                return False
        return True

    def replay(self, inputs: tuple[Any, ...]) -> list[Any]:
        """Results for these inputs."""
        for value, recorded, is_state in zip(inputs, self._inputs, self._stays, strict=True):
            if isinstance(value, torch.Tensor) and not is_state:
                recorded.copy_(value)
        self._graph.replay()
        copies = []
        for result in self._results:
            copies.append(result.clone() if isinstance(result, torch.Tensor) else result)
        return copies
