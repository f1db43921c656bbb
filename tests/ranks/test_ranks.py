"""Rank processes without pytest around them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest

from pytest_torchcompile import system
from pytest_torchcompile.ranks import listeners, serving, zygote
from pytest_torchcompile.ranks import rank as rank_module
from pytest_torchcompile.ranks.rank import Rank, _how_it_ended, _innermost_place, _read_stacks
from pytest_torchcompile.ranks.zygotes import Zygote

pytestmark = pytest.mark.needs_torch


@pytest.fixture
def started(monkeypatch):
    """A zygote that imports only, and its end."""
    monkeypatch.setenv(serving.WARM, "0")
    made = Zygote(300.0)
    yield made
    made.close()


def test_a_rank_is_reused_and_replaced(started):
    """Jobs share a process until it is closed; the next job gets another."""
    rank = Rank(started.folder)
    first = rank.run({"do": "environment"}, 60)
    assert first.status == "done"
    assert first.value["torch"]
    pid = rank.pid
    rank.run({"do": "environment"}, 60)
    assert rank.pid == pid
    rank.close()
    rank.run({"do": "environment"}, 60)
    assert rank.pid != pid
    rank.close()


def test_a_spoilt_rank_is_replaced(started):
    """A process that could not clean up, or that grew too large, does not get another job."""
    rank = Rank(started.folder)
    rank.run({"do": "environment"}, 60)
    pid = rank.pid
    rank._end_if_spoilt({"poisoned": True, "rss": 1})
    rank.run({"do": "environment"}, 60)
    assert rank.pid != pid
    pid = rank.pid
    rank._end_if_spoilt({"poisoned": False, "rss": 1 << 40})
    rank.run({"do": "environment"}, 60)
    assert rank.pid != pid
    rank.close()


@pytest.mark.parametrize(("limit", "memory"), [("max\n", 64 << 30), (f"{16 << 30}\n", 16 << 30), (None, 64 << 30)])
def test_how_much_a_rank_may_grow(monkeypatch, tmp_path, limit, memory):
    """A quarter of a core's share of what the machine, or the container, has."""
    file = tmp_path / "memory.max"
    if limit is not None:
        file.write_text(limit)
    monkeypatch.setattr(system, "_CGROUP", file)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 16 << 20, "SC_PAGE_SIZE": 4096}.__getitem__)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert rank_module.growth_bytes() == memory // 8 // 4


def test_a_fresh_interpreter_serves_as_a_fork_does(tmp_path):
    """Where a fork could not use CUDA, the child becomes a new interpreter that serves the same connection."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", zygote._FRESH, json.dumps(sys.path), str(theirs.fileno()), str(tmp_path)]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        with Connection(ours.detach()) as connection:
            assert connection.recv() == process.pid
            connection.send({"do": "environment"})
            assert json.loads(connection.recv())["value"]["torch"]


SERVE_NOTHING = """
import gc, sys
from multiprocessing import Pipe
from pathlib import Path
from pytest_torchcompile.ranks.serving import serve_jobs
ours, theirs = Pipe()
ours.close()
folder = Path(sys.argv[1])
with open(sys.argv[1] + "/thresholds", "w") as told:
    try:
        serve_jobs(theirs, folder, lambda stacks: None)
    except OSError:
        pass
    print(*gc.get_threshold(), file=told)
"""


def test_a_rank_looks_for_garbage_less_often(tmp_path):
    """Python's own first threshold is 700 (2000 from 3.13 on), and torch makes so many objects for a few operators."""
    subprocess.run([sys.executable, "-c", SERVE_NOTHING, str(tmp_path)], check=True)
    assert (tmp_path / "thresholds").read_text().split() == ["5000", "10", "10"]


@pytest.mark.parametrize(("code", "text"), [
    (7, "the process ended itself with exit code 7"), (-9, "killed, perhaps for want of memory (SIGKILL)"),
    (-11, "segmentation fault (SIGSEGV)"), (-6, "aborted (SIGABRT)"), (-15, "ended by a signal (SIGTERM)"),
    (0xC0000005, "segmentation fault (access violation)"),
])  # fmt: skip
def test_how_a_process_ended(code, text):
    """The exit code in words; the last one is of Windows."""
    assert _how_it_ended(code) == text


STACK = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 2965 in group_norm
  File "/home/me/models.py", line 41 in forward
"""


@pytest.mark.parametrize(("stacks", "place"), [
    (STACK, " in group_norm (torch/nn/functional.py:2965)"),
    (STACK.replace("/venv/lib/python3.11/site-packages/torch/nn", "/home/me/nets"),
     " in group_norm (nets/functional.py:2965)"),
    ('Thread 0x01 (most recent call first):\n  File "/a/b.py", line 1 in waits\n\n' + STACK,
     " in group_norm (torch/nn/functional.py:2965)"),
    # A thread that waits for the other stands behind it.
    ("Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n"
     '  <no Python frame>\n\nThread 0x01 (most recent call first):\n  File "/a/b.py", line 1 in waits\n',
     " in a thread that runs no Python"),
    # A process that it has forked has died before, and written to the same file.
    (STACK.replace("group_norm", "its_child") + "\n" + STACK, " in group_norm (torch/nn/functional.py:2965)"),
    (STACK.replace("/venv/lib/python3.11/site-packages/torch/nn/functional", "/tmp/torchinductor_me/ab/c" + 50 * "x"),
     " in code that Inductor has generated"),
    # Asked for, and not written at an end.
    (STACK.partition("\n\n")[2], ""),
    ("", ""),
])
def test_where_a_process_ended(stacks, place):
    """The innermost frame of the thread that the signal has ended, which a log that shows one line has too."""
    assert _innermost_place(stacks) == place


def test_a_process_is_told_its_gpus_before_it_uses_cuda(monkeypatch):
    """By the variable that CUDA reads when it is first used."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
    monkeypatch.setattr("pytest_torchcompile.run.runner.environment", lambda: dict(os.environ))
    done = serving.execute_job({"do": "environment", "gpus": ("3", "5")})
    assert done["value"]["CUDA_VISIBLE_DEVICES"] == "3,5"


def test_a_thread_that_is_ending_is_left_out(tmp_path):
    """It has no frame but those of Python's own threading.py. So are our own, and tqdm's."""
    path = tmp_path / "stacks"
    ending = 'Thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 1080 in _delete\n'
    waiting = ('Thread 0x2 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 327 in wait\n'
               '  File "/home/me/model.py", line 3 in forward\n')
    ours = f'Thread 0x4 (most recent call first):\n  File "{listeners.__file__}", line 29 in _wait_and_end\n'
    main = 'Current thread 0x3 (most recent call first):\n  File "/home/me/train.py", line 9 in <module>\n'
    peers = 'Thread 0x6 (most recent call first):\n  File "/venv/gauges/settled_collectives.py", line 43 in _wait\n'
    bars = ('Thread 0x5 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 331 in wait\n'
            '  File "/venv/lib/python3.11/site-packages/tqdm/_monitor.py", line 69 in run\n')
    path.write_text(ending + ours + bars + peers + waiting + main)
    assert _read_stacks(path) == (peers + waiting + main).strip()
