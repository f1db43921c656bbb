"""Which processes are ended with a cell, and which are torch's own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pytest_torchcompile.gauges.compiler import kept_processes
from pytest_torchcompile.run.offspring import end_offspring, offspring_of

pytestmark = pytest.mark.needs_torch
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def before():
    """What this process had started before the test."""
    return offspring_of(os.getpid())


def test_inductors_pool_is_kept(before):
    """It serves the cells after this one; another process of a cell is none of it."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.process_pool.cache_clear()
    other = subprocess.Popen(SLEEP)
    with config.patch(compile_threads=2, worker_start_method="subprocess"):
        pool = AsyncCompile.process_pool()
    try:
        found = offspring_of(os.getpid(), before)
        assert {pool.process.pid, other.pid} <= found
        kept = kept_processes(found)
        assert pool.process.pid in kept
        assert other.pid not in kept
        end_offspring(keep=before | kept)
        assert other.wait(10) == -9 or other.returncode == 0  # its end was taken note of before
        assert pool.process.poll() is None
    finally:
        pool.process.kill()
        pool.process.wait()
        AsyncCompile.process_pool.cache_clear()


def test_workers_that_inductor_forks_are_kept(monkeypatch):
    """They have the command of this process, so the pool is asked."""
    from torch._inductor.async_compile import AsyncCompile

    class Pool:
        def __init__(self):
            self._processes = {4711: object()}

    AsyncCompile.process_pool.cache_clear()
    assert kept_processes([]) == set()

    class Cached:
        currsize = 1

    def process_pool():
        return Pool()

    process_pool.cache_info = lambda: Cached
    monkeypatch.setattr(AsyncCompile, "process_pool", staticmethod(process_pool))
    assert kept_processes([]) == {4711}


def test_what_descends_from_a_process_that_is_kept_is_kept(before):
    """A helper that an import has started may start others."""
    code = f"import subprocess; print(subprocess.Popen({SLEEP!r}).pid, flush=True); import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as helper:
        assert helper.stdout is not None
        child = int(helper.stdout.readline())
        assert {helper.pid, child} <= offspring_of(os.getpid(), before)
        end_offspring(keep=before | {helper.pid})
        assert helper.poll() is None
        assert child in offspring_of(os.getpid(), before)
        helper.kill()
    os.kill(child, 9)
