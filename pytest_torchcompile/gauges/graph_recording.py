"""What a GPU is given, recorded as a CUDA graph, so that a recording that fails leaves nothing behind.

``torch.cuda.graph`` stays on its own stream where recording fails, and torch leaves its allocator and its generator in
the middle of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["has_failed_on", "recorded"]


@dataclass
class _Device:
    """What all recordings of a GPU have in common."""

    stream: torch.cuda.Stream
    """The default stream can't be recorded. With one for all, cuBLAS takes memory for it once."""
    has_failed: bool = False


_DEVICES: dict[torch.device, _Device] = {}


def has_failed_on(device: torch.device) -> bool:
    """Whether a recording has failed on this GPU, in this process: then better try no other one."""
    return _on(device).has_failed


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, device: torch.device, memory: Any) -> Iterator[None]:
    """Record what runs inside; ``memory``: of ``torch.cuda.graph_pool_handle``.

    Raises:
        RuntimeError: something that runs can't be recorded. Generators and allocator are as if nothing had run.
    """
    outside, shared = torch.cuda.current_stream(device), _on(device)
    generator = torch.cuda.default_generators[device.index or 0]
    state = generator.get_state()
    shared.stream.wait_stream(outside)
    try:
        with torch.cuda.stream(shared.stream):
            # A kernel that runs for the first time is loaded then, and other threads may call CUDA.
            graph.capture_begin(pool=memory, capture_error_mode="relaxed")
            try:
                yield
            finally:
                graph.capture_end()
    except RuntimeError:
        shared.has_failed = True
        _end_allocating(device, memory)
        _mend_generator(generator, shared.stream)
        generator.set_state(state)
        raise
    finally:
        outside.wait_stream(shared.stream)


def _on(device: torch.device) -> _Device:
    if device not in _DEVICES:
        _DEVICES[device] = _Device(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return _DEVICES[device]


def _mend_generator(generator: torch.Generator, stream: torch.cuda.Stream) -> None:
    """Bring a generator back from a recording that has failed: else no random number can be drawn.

    ``CUDAGraph::capture_end`` raises before it tells the generator (seen in torch 2.11). The end of another recording
    tells it. Graphs that have the generator keep it.
    """
    try:
        torch.rand(1, device=generator.device, generator=generator)
    except RuntimeError:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="relaxed")
            torch.zeros(1, device=generator.device)
            graph.capture_end()


def _end_allocating(device: torch.device, memory: Any) -> None:
    """Tell the allocator that a recording has ended which failed: else it gives no memory back any more.

    ``CUDAGraph::capture_end`` raises before it does so, up to pytorch/pytorch#180395. Private:
    ``torch._C._cuda_endAllocateToPool`` and ``torch._C._cuda_releasePool`` (torch 2.8 to 2.15).
    """
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        end = getattr(torch._C, name, None)
        if end is None:
            continue
        # Where torch has done it itself it raises.
        with suppress(RuntimeError):
            end(device.index or 0, memory)
