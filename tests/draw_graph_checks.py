"""What draws by graphs have to hold, on a GPU and emulated; and models that make it hard."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from transcript_programs import draw

from pytest_torchcompile.oracle.draw_graph import DrawGraph


@torch.library.custom_op("torchcompile_tests::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    """Ask the GPU for a number, which can't be recorded."""
    return x * (1.0 + 0.0 * x.sum().item())


waits.register_autograd(lambda _, grad: grad)


def draw_by_graph(runs, sequence, noise=1.0, rest=True):
    values = draw(runs, sequence, noise, rest)
    assert isinstance(runs._noisy_runs.made_of, DrawGraph), runs._noisy_runs.why_no_graph
    return values


def sizes_of_noise(runs, draws):
    """The root mean square of what draws change, for each leaf of floating numbers."""
    sizes = {}
    for name, estimate in runs.estimates.items():
        if estimate.continuous:
            errors = [values[name].double().cpu() - estimate.value.double().cpu() for values in draws]
            sizes[name] = float(torch.stack(errors).square().mean().sqrt())
    return sizes


def check_noise(runs):
    by_graph = [draw_by_graph(runs, sequence) for sequence in range(40)]
    by_program = []
    for sequence in range(40):
        runs._dice.begin_sequence(sequence)
        by_program.append(runs._run_with(1.0).values_by_name())
    assert by_graph[0].keys() == by_program[0].keys()
    mine, theirs = sizes_of_noise(runs, by_graph), sizes_of_noise(runs, by_program)
    for leaf, size in theirs.items():
        assert mine[leaf] == pytest.approx(size, rel=0.5, abs=1e-16), leaf
    assert len({float(values["loss"]) for values in by_graph}) == 40


def check_training(runs):
    """Parameters are written to: each launch begins with those from before the steps."""
    exact = {name: estimate.value for name, estimate in runs.estimates.items()}
    name = next(name for name in exact if name.endswith("weight after the call"))
    moved = []
    for sequence in (1, 2, 3):
        value = draw_by_graph(runs, sequence)[name]
        moved.append(float((value.cpu() - exact[name].cpu()).abs().max() / exact[name].abs().max()))
    assert all(0 < distance < 1e-3 for distance in moved)
    assert max(moved) < 4 * min(moved), "each draw goes on from the one before"


def check_memory(runs, device):
    """Memory that nobody names is kept, and put back before each launch."""
    exact = runs.estimates["output"].value
    draw_by_graph(runs, 1)
    gc.collect()
    others = [torch.full((8, 8), 1e9, device=device, dtype=torch.float64) for _ in range(50)]
    for sequence in range(2, 6):
        distance = (draw_by_graph(runs, sequence)["output"].cpu() - exact.cpu()).abs().max()
        assert 0 < distance < 1e-4
    assert all(bool((other == 1e9).all()) for other in others)


def with_memory_that_nobody_names(device):
    """A function with a weight, and a state that it writes to: they are neither parameters nor buffers."""
    weight, state = torch.randn(8, 8, device=device), torch.zeros(8, device=device, dtype=torch.float64)

    def model(x):
        state.add_(x.mean(0))
        return (x @ weight).tanh() + state

    return model


class CountsInPython(nn.Module):
    """Multiplies by how often it was called, which a graph takes for a constant."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        CountsInPython.calls += 1
        return self.layer(x) * CountsInPython.calls
