"""Models that are shipped: products of matrices alone, for which Inductor builds no kernel."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass


class Heads(nn.Module):
    """Two layers, nothing between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.first(x))


def heads():
    return Heads()


def in_second_process():
    """Is this another process than the first that asked, as told by a file?"""
    seen = Path(os.environ["ARTIFACT_MODELS_SEEN"])
    if not seen.exists():
        seen.write_text(str(os.getpid()))
    return seen.read_text() != str(os.getpid())


def hooked_heads():
    """The same hook in both processes: the artifact has it inside."""
    model = Heads()
    model.register_forward_hook(lambda module, args, output: output * 2)
    return model


def hooked_where_loaded():
    """A hook that is registered after the artifact was made: compiled code doesn't ask for it."""
    return hooked_heads() if in_second_process() else Heads()


SCALE = 3.0


class Scaled(Heads):
    """Reads a global of its module."""

    def forward(self, x):
        return super().forward(x) if SCALE > 2 else self.first(x)


def scaled_heads():
    """The process that loads finds another value of the global than the one that compiled."""
    global SCALE
    SCALE = 1.0 if in_second_process() else 3.0
    return Scaled()


def raises():
    raise ValueError("no such weights")


def vectors(B):
    return torch.randn(B, 8)


class Doubling(CustomGraphPass):
    """A pass on graphs. Only the process that compiles first has it do something; its key is always the same."""

    def __call__(self, graph):
        if in_second_process():
            return
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default):
            node.kwargs = {"alpha": 2}

    def uuid(self):
        return "a key that says nothing of the version"


class Harmless(Doubling):
    """Its clean twin: it does the same in both, nothing."""

    def __call__(self, graph):
        pass


def passed_heads():
    """Compiled with a pass whose key does not tell its two versions apart."""
    inductor_config.post_grad_custom_post_pass = Doubling()
    return Heads()


def harmlessly_passed_heads():
    """Compiled with a pass that was not changed."""
    inductor_config.post_grad_custom_post_pass = Harmless()
    return Heads()
