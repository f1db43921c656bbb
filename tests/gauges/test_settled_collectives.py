"""A profiler is left once gloo has ended what was begun in it: else the process may die, see docs/found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pytest_torchcompile.gauges.coverage import measure_coverage
from pytest_torchcompile.gauges.settled_collectives import settled_collectives

pytestmark = pytest.mark.needs_torch
# Two ranks: rank 1 is late with each collective, so that rank 0 has one under way when its call has returned.
RANKS = """
import os, sys, time
import torch
import torch.distributed as dist
from pytest_torchcompile.gauges import settled_collectives as settled, step_profile
from pytest_torchcompile.gauges.coverage import measure_coverage
from pytest_torchcompile.gauges.flight_recorder import keep_entries

keep_entries()
store = dist.FileStore(sys.argv[1], 2)
rank = int(os.fork() == 0)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
late = 0.2
if sys.argv[2] == "hasty":
    settled._PATIENCE = 0
    # On a busy machine rank 0 may stand still for a while before it leaves a profile.
    late = 1.5
works = []

def begin():
    if rank == 1:
        time.sleep(late)
    works.append(dist.all_reduce(torch.ones(4) + 1, async_op=True))

ended = []
profiler = torch.autograd.profiler.profile

class Watched(profiler):
    def __exit__(self, *error):
        ended.append(works[-1].is_completed())
        return super().__exit__(*error)

torch.autograd.profiler.profile = Watched
measure_coverage(begin, begin)
step_profile.profile_step(begin, times=2, seconds=0)
if rank == 0:
    print(ended)
for work in works:
    work.wait()
if rank == 0:
    os.wait()
"""


def run_ranks(folder, how):
    """What rank 0 prints: at the end of each profile, whether the collective had been completed."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
    command = [sys.executable, "-W", "ignore", "-c", RANKS, str(folder / how), how]
    ran = subprocess.run(command, env={**os.environ, **loopback}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1]


def test_a_profile_ends_behind_its_collectives(tmp_path):
    assert run_ranks(tmp_path, "patient") == "[True, True, True]"


def test_without_patience_they_are_under_way(tmp_path):
    """So the test above can fail."""
    assert run_ranks(tmp_path, "hasty") == "[False, False, False]"


def test_without_a_group_nothing_is_waited_for(monkeypatch):
    monkeypatch.setattr("pytest_torchcompile.gauges.flight_recorder.count_under_way", lambda since: 1 / 0)
    with settled_collectives():
        pass
    x = torch.ones(3)
    assert measure_coverage(x.sin, x.sin).total == 1
