"""Why a model is not faster: one model planted for each cause, run as cells, and one that has none.

Which verdict a busy machine gives is chance. So what a cell measured is asked for its causes as if it were no faster.
"""

from __future__ import annotations

import pytest

from pytest_torchcompile.checks.slow_causes import slow_causes

pytestmark = pytest.mark.needs_torch
NO_CAUSE = ("healthy", "beating")
PLANTED = """
import itertools
import pytest_torchcompile.gauges.machine_peaks as peaks
torch._dynamo.config.recompile_limit = 1000
STEPS = itertools.count(1)

@torch._dynamo.disable
def next_step():
    return next(STEPS) % 300 + 1

class Outside(torch.nn.Module):
    '''Compiles two operators, and leaves twelve to eager.'''
    def forward(self, x):
        return self.rest(torch.tanh(x) * 2)

    @torch._dynamo.disable
    def rest(self, x):
        for _ in range(12):
            x = torch.sin(x)
        return x

class Again(torch.nn.Module):
    '''Another size in every step, which static shapes compile for again.'''
    def forward(self, x):
        return x * 2 + torch.zeros(next_step()).sum()

class Unfused(torch.nn.Module):
    '''Nothing but products, which a library computes.'''
    def forward(self, x):
        return x @ x @ x @ x

class Tiny(torch.nn.Module):
    '''A hundred products of 4 by 4.'''
    def forward(self, x):
        for _ in range(100):
            x = x @ x
        return x

class Copying(torch.nn.Module):
    '''Moves bytes as fast as the memory can.'''
    def forward(self, x):
        return x * 2

class Reading(torch.nn.Module):
    '''Takes a number out of a tensor, and computes with it.'''
    def forward(self, x):
        scale = x.sum().item()
        for _ in range(9):
            x = torch.sin(x)
        return x * scale

class Sleeping(torch.nn.Module):
    '''Loads something in forward.'''
    def forward(self, x):
        time.sleep(0.05)
        return torch.tanh(x) * 2

class Healthy(torch.nn.Module):
    '''A long row of cheap operators on a large tensor: one kernel instead of twelve.'''
    def forward(self, x):
        for _ in range(6):
            x = (x * 1.5).relu()
        return x

def square(width):
    return torch.randn(width, width) / width

def fast_memory(*args):
    return 1e13

def slow_memory(*args):
    return 1e6

def own_memory(*args):
    '''A little less than a bare copy of that size reaches, whose memory is new in each step, as in the cell.'''
    x, seconds = square(4000), []
    for _ in range(20):
        begun = time.perf_counter()
        x * 2
        seconds.append(time.perf_counter() - begun)
    return 0.9 * 2 * x.nbytes / min(seconds)

class Beating(Copying):
    '''Is faster than a memory that is told to be slow: what a cache does, or bytes that were counted and not moved.'''

def outside(): return planted(Outside)
def again(): return planted(Again)
def unfused(): return planted(Unfused)
def tiny(): return planted(Tiny)
def copying(): return planted(Copying, own_memory)
def beating(): return planted(Beating, slow_memory)
def reading(): return planted(Reading)
def sleeping(): return planted(Sleeping)
def healthy(): return planted(Healthy)

# What a memory gives depends on the machine, and on how busy it is; so each model has peaks of its own.
def planted(model, bandwidth=fast_memory):
    os.environ["PYTEST_TORCHCOMPILE_PEAKS"] = f"{model.__name__}.json"
    peaks._measure_bandwidth, peaks._measure_product = bandwidth, fast_memory
    return model()
"""
NAMES = {"outside": 64, "again": 8, "unfused": 256, "reading": 8, "sleeping": 8}
"""Each with its width; run by the backend `eager`, which captures as Inductor does, and fuses nothing."""
FUSED = {"tiny": 4, "copying": 4000, "beating": 600, "healthy": 2400}


MATRIX = """
version: 1
models:
  MODELS
axes: {backend: [eager, inductor], dynamic: [static], phase: [inference]}
rules:
  - exclude: {backend: inductor, model: [EAGER]}
    reason: fuses nothing, as is asked here
  - exclude: {backend: eager, model: [FUSED]}
    reason: it takes a backend that fuses
checks: [worth]
"""


def matrix():
    models = "\n  ".join(f'{name}: {{factory: "models:{name}", inputs: "models:square", dims: {{width: {width}}}}}'
                         for name, width in (NAMES | FUSED).items())
    text = MATRIX.replace("MODELS", models)
    return text.replace("[EAGER]", f"[{', '.join(NAMES)}]").replace("[FUSED]", f"[{', '.join(FUSED)}]")


def causes(section):
    """What is told of a model as if it were no faster."""
    assert section["raised"] is None, section
    assert not section["wrong"], section
    return slow_causes({**section, "verdict": "no difference"})


@pytest.mark.slow
def test_each_planted_cause_is_named_and_the_healthy_has_none(repo):
    repo.models(PLANTED)
    repo.matrix(matrix())
    repo.run()
    found = {cell["axes"]["model"]: cell["observation"]["sections"]["worth"] for cell in repo.block()["cells"]}
    first = {name: causes(section)[0] for name, section in found.items() if name not in NO_CAUSE}
    kinds = {"outside": "coverage", "again": "recompiles", "unfused": "fusion", "sleeping": "host", "tiny": "launches",
             "copying": "roof"}
    for name, kind in kinds.items():
        assert first[name].kind == kind, (first[name], found[name])
    assert "% of the operator calls run outside of compiled graphs; the first graph break" in first["outside"].text
    assert "models.py:" in first["outside"].text
    assert " in the timed steps: " in first["again"].text
    assert "so nothing was fused" in first["unfused"].text
    assert "of a compiled step passes in Python" in first["sleeping"].text
    assert "kernel calls of" in first["tiny"].text
    assert "% of the memory's bandwidth" in first["copying"].text
    # A roof that was passed by far is none: nobody is told that no compiler helps.
    assert found["beating"]["roof"]["share"] > 2
    assert "its roof could not be told" in found["beating"]["text"]
    assert "roof" not in [cause.kind for cause in causes(found["beating"])]
    # What is left to eager is told too, and may take longer.
    reading = [cause.text for cause in causes(found["reading"]) if "1 number out of tensors" in cause.text]
    assert reading, found["reading"]
    assert "models.py:" in reading[0]
    assert [cause.text for cause in causes(found["healthy"])] == []
    # Kernels of a step and what it moves are measured, not planted.
    assert found["healthy"]["kernels_share"] < 0.2
    assert found["healthy"]["work"]["bytes"] > 5 * found["healthy"]["work"]["least_bytes"]
