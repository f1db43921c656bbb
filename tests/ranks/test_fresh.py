"""Fresh rank processes, on a system without fork, signals, named pipes and file locks; what they run needs no torch."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from other_system import site_folder

from pytest_torchcompile import system
from pytest_torchcompile.errors import NoRank
from pytest_torchcompile.ranks import fresh, starting
from pytest_torchcompile.ranks.gpus import open_leases
from pytest_torchcompile.ranks.rank import Rank
from pytest_torchcompile.ranks.starting import open_processes

RUNNER = """
import types
from pathlib import Path
runner = sys.modules["pytest_torchcompile.run.runner"] = types.ModuleType("runner")
runner.environment = lambda: eval(Path({job!r}).read_text())
"""
"""Instead of torch: a job is a Python expression in a file."""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The file of the job that every rank process does."""
    file = tmp_path / "job.py"
    file.write_text("7")
    monkeypatch.setenv("PYTHONPATH", str(site_folder(tmp_path, RUNNER.format(job=str(file)))))
    monkeypatch.setattr(starting, "can_fork", lambda: False)
    return file


@pytest.fixture
def run(job):
    """The run's folder, which is gone afterwards."""
    made = open_processes()
    yield made
    made.close()
    assert not made.folder.exists()


@pytest.fixture
def rank(run):
    """One rank process, started when it is first needed."""
    with contextlib.closing(Rank(run.folder)) as made:
        yield made


def do(rank, job, expression, timeout=120.0):
    """What comes of one job."""
    job.write_text(expression)
    return rank.run({"do": "environment"}, timeout)


def test_a_fresh_process_does_jobs_one_after_another(rank, job):
    """One process serves them all, and what it printed last is its log."""
    assert do(rank, job, "__import__('os').getpid()").value == rank.pid
    pid = rank.pid
    assert do(rank, job, "print('×', flush=True)").status == "done"
    assert (rank.pid, rank.log) == (pid, "×")


@pytest.mark.parametrize(("ends", "message"), [
    ("__import__('os')._exit(7)", "the process ended itself with exit code 7"),
    ("__import__('os').abort()", r"aborted \(SIGABRT\) in .+ \(\S+:\d+\)"),
])
def test_a_process_that_ends_is_told_and_followed_by_another(rank, job, ends, message):
    """How it ended is known although nothing stands between it and pytest."""
    outcome = do(rank, job, f"[print('last words', flush=True), {ends}]")
    assert outcome.status == "crash"
    assert re.fullmatch(message, outcome.message), outcome.message
    assert "last words" in outcome.evidence
    assert do(rank, job, "8").value == 8


def test_a_process_that_hangs_shows_where(rank, job):
    """Stacks are asked for without a signal; those of the thread that writes them are left out."""
    Path(job.parent / "hangs.py").write_text("import time\ndef wait_for_ever():\n    time.sleep(600)\n")
    sys_path = f"__import__('sys').path.append({str(job.parent)!r})"
    assert do(rank, job, "1").status == "done"
    outcome = do(rank, job, f"[{sys_path}, __import__('hangs').wait_for_ever()]", timeout=2.0)
    assert (outcome.status, outcome.message) == ("timeout", "no result after 2 s")
    assert "in wait_for_ever" in outcome.evidence
    assert "listeners.py" not in outcome.evidence
    assert do(rank, job, "9").value == 9


def test_a_process_that_cannot_begin_says_why(run, tmp_path, monkeypatch):
    """What it wrote before it ended is the evidence."""
    (tmp_path / "site/sitecustomize.py").write_text("import os, sys\nos.write(2, b'no way in')\nos._exit(3)\n")
    with pytest.raises(NoRank, match=r"^a rank process ended before it could take a job$") as caught:
        Rank(run.folder).run({"do": "environment"}, 60)
    assert caught.value.evidence == "no way in"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(NoRank, match=r"^a rank process could not be started: .*No such file"):
        Rank(run.folder).run({"do": "environment"}, 60)
    with pytest.raises(NoRank, match=r"^the folder of the run's processes is gone: "):
        fresh.start_fresh(tmp_path / "none")


OWNER = """
import time
from pytest_torchcompile.ranks.rank import Rank
from pytest_torchcompile.ranks.starting import open_processes
rank = Rank(open_processes().folder)
rank.begin({"do": "environment"})
print(rank.pid, flush=True)
time.sleep(600)
"""


def test_a_process_ends_with_the_pytest_that_started_it(job, tmp_path):
    """Also in the middle of a job, and where that pytest was killed: nothing comes in any more."""
    began = tmp_path / "began"
    job.write_text(f"[open({str(began)!r}, 'w').close(), __import__('time').sleep(600)]")
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "TMPDIR": str(tmp_path)})
    pid = int(owner.stdout.readline())
    until(began.exists)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until(lambda: not Path(f"/proc/{pid}").exists())


def until(true, seconds=120):
    """Wait for something that happens soon, also on a busy machine."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_a_system_does_not_say(monkeypatch):
    """Without the names that tell it, there is an answer that harms nobody."""
    for name in ("sysconf", "sched_getaffinity", "mkfifo"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert (system.usable_cores(), system.memory_bytes(), system.resident_bytes()) == (1, 8 << 30, 0)
    assert not system.can_make_pipes()


@pytest.mark.parametrize(("platform", "forks", "locks"), [
    ("linux", True, True), ("darwin", False, True), ("win32", False, False)])
def test_what_each_system_can_do(monkeypatch, platform, forks, locks):
    """macOS has a fork, after which its own libraries may end the process."""
    monkeypatch.setattr(sys, "platform", platform)
    assert (system.can_fork(), system.can_lock_files()) == (forks, locks)
    assert (open_leases(1) is not None) == locks
