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


def hooked_heads():
    """A hook on the module that is called: it is no part of ``forward``."""
    model = Heads()
    model.register_forward_hook(lambda module, args, output: output * 2)
    return model


SCALE = 3.0


class Scaled(Heads):
    """Reads a global of its module."""

    def forward(self, x):
        return super().forward(x) if SCALE > 2 else self.first(x)


def scaled_heads():
    """The process that loads finds another value of the global than the one that compiled."""
    global SCALE
    SCALE = 3.0
    seen = Path(os.environ["ARTIFACT_MODELS_SEEN"])
    if seen.exists() and seen.read_text() != str(os.getpid()):
        SCALE = 1.0
    else:
        seen.write_text(str(os.getpid()))
    return Scaled()


def vectors(B):
    return torch.randn(B, 8)


class OlderPass(CustomGraphPass):
    """A pass on graphs that was changed, and kept its key: the process that compiles still has the older one."""

    def __call__(self, graph):
        seen = Path(os.environ["ARTIFACT_MODELS_SEEN"])
        if seen.exists() and seen.read_text() != str(os.getpid()):
            return
        seen.write_text(str(os.getpid()))
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default):
            node.kwargs = {"alpha": 2}

    def uuid(self):
        return "a key that says nothing of the version"


def passed_heads():
    """Compiled with a pass whose key does not tell its two versions apart."""
    inductor_config.post_grad_custom_post_pass = OlderPass()
    return Heads()
