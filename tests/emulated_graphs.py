"""CUDA graphs for a machine without a GPU: operators of a CPU are written down, and run again in the same memory.

As on a GPU nothing has run after a recording: what operators have changed is put back.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytest_torchcompile.oracle import draw_graph
from pytest_torchcompile.oracle.properties import storage_address
from pytest_torchcompile.oracle.transcript_memory import bytes_of


class Graph(TorchDispatchMode):
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self):
        super().__init__()
        self.calls, self.before = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tensors_of((args, kwargs)):
            address = storage_address(tensor)
            if address and address not in self.before:
                self.before[address] = bytes_of(tensor), bytes_of(tensor).clone()
        out = func(*args, **(kwargs or {}))
        # A GPU has nothing to do for these.
        if func._schema.name not in ("aten::set_", "aten::empty"):
            self.calls.append((func, args, kwargs or {}, out))
        return out

    def end(self):
        """Put back what was changed."""
        for memory, before in self.before.values():
            memory.copy_(before)

    def replay(self):
        """Run all of it again."""
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tensors_of(out), tensors_of(again), strict=True):
                if storage_address(old) != storage_address(new):
                    old.copy_(new)


def tensors_of(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@contextmanager
def recorded(graph, device, memory):
    """Stands for ``graph_recording.recorded``."""
    with graph:
        yield
    with torch.no_grad():
        graph.end()


def emulate(monkeypatch):
    """Have draw graphs made so."""
    monkeypatch.setattr(draw_graph, "recorded", recorded)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def new_graph():
    """An empty draw graph for a program on a CPU."""
    return draw_graph.DrawGraph(torch.device("cpu"), torch.float64)
