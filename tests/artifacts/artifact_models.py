"""Models that are shipped: products of matrices, which need no C++ kernel, and one with one. And makers that fail."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.run import artifact_cell


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


class Kernel(nn.Module):
    """One C++ kernel, of which Inductor builds a library."""

    def forward(self, x):
        return torch.relu(x) * 2


def kernel():
    return Kernel()


def raises():
    raise ValueError("no such weights")


class Branching(Heads):
    """Asks for a value, which torch cannot trace whole."""

    def forward(self, x):
        return self.second(x if x.sum().item() > 0 else self.first(x))


class Powered(Heads):
    """Has a number among its arguments."""

    def forward(self, x, power=2):
        return super().forward(x) ** power


def branching():
    return Branching()


def powered():
    return Powered()


def with_power(B):
    return (torch.randn(B, 8),), {"power": 2}


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


def maker_with_a_mistake(order):
    """As if a route of this package had a mistake of its own."""
    return artifact_cell.make_artifact(order | {"declared": []})


def maker_that_is_killed(order):
    os.kill(os.getpid(), signal.SIGKILL)


def maker_of_a_matrix(order):
    """An exception that cannot be sent from process to process."""
    raise MatrixError("a.yaml", 1, 2, "no such model")


def loader_with_a_mistake(order):
    """The folder is none, so that no file is found in it; torch is not asked."""
    return artifact_cell.program_of(order | {"folder": order["folder"] + "-gone"})


def loader_that_is_killed(order):
    os.kill(os.getpid(), signal.SIGKILL)
