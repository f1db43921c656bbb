"""What is measured of a step is the step alone: a copy of its batch is work of a GPU too, and memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.checks import kernels as kernels_check
from pytest_torchcompile.gauges import kernels as kernels_gauge
from pytest_torchcompile.gauges.kernels import Launches
from pytest_torchcompile.gauges.memory import Memory
from pytest_torchcompile.layer import benchmark as benchmark_module
from pytest_torchcompile.layer import step_runner
from pytest_torchcompile.layer.benchmark import benchmark_sides
from pytest_torchcompile.layer.step_runner import StepRunner

pytestmark = pytest.mark.needs_torch


class Watched:
    """Gauges that run what they are given, and tell of copies that are made meanwhile."""

    def __init__(self, monkeypatch):
        self.steps, self.copies, self._inside = 0, 0, False
        clone = Batch.clone

        def watched_clone(batch):
            self.copies += self._inside
            return clone(batch)

        monkeypatch.setattr(Batch, "clone", watched_clone)

    def run(self, call):
        self._inside = True
        call()
        self._inside = False
        self.steps += 1


def test_no_copy_of_the_batch_in_launches_and_memory(monkeypatch):
    """A copy kept the GPU busy for 182 % of a step that does nothing but move bytes."""
    watched = Watched(monkeypatch)

    def launches(call):
        watched.run(call)
        return Launches(1, 0, 1, busy_seconds=1e-6)

    def memory(call, device):
        watched.run(call)
        return Memory(0, 0, 0, "cuda")

    monkeypatch.setattr(step_runner, "count_launches", launches)
    monkeypatch.setattr(benchmark_module, "measure_memory", memory)
    asked = iter(("cuda:0", "cuda:0"))

    def device_of(batch):
        # Steps are timed by the wall clock here, and looked into as on a GPU.
        return next(asked, "cpu") if looking else "cpu"

    looking = False
    look_inside = benchmark_module.look_inside

    def look(*given):
        nonlocal looking
        looking = True
        return look_inside(*given)

    monkeypatch.setattr(step_runner, "device_of", device_of)
    monkeypatch.setattr(benchmark_module, "look_inside", look)
    module = torch.nn.Linear(3, 3)
    runner = StepRunner(module, module, None)
    found = benchmark_sides(runner, runner, lambda number: torch.ones(2, 3), rounds=8, asked=False, seconds=0.01)
    assert set(found.launches) == {"eager", "compiled"}
    assert (watched.steps, watched.copies) == (4, 0)


def test_no_copy_of_the_batch_in_the_launches_of_the_check(monkeypatch):
    watched = Watched(monkeypatch)

    def launches(call):
        watched.run(call)
        return Launches(1, 0, 1)

    monkeypatch.setattr(kernels_gauge, "count_launches", launches)
    monkeypatch.setattr(Batch, "is_on_cuda", True)
    module = torch.nn.Linear(3, 3)
    side = SimpleNamespace(call=module, module=module, restore=lambda: None)
    run = SimpleNamespace(calls=[SimpleNamespace(batch=Batch.of(torch.ones(2, 3)), label="call 1")], side=side,
                          loss=None, train=False, make=lambda settings: side)
    section = kernels_check._measure_launches(run)
    assert section["call"] == "call 1"
    assert (watched.steps, watched.copies) == (2, 0)
