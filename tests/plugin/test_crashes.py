"""A cell that crashes, hangs or is killed costs that cell and nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from ctrl_c import heed_ctrl_c

pytestmark = pytest.mark.needs_torch
CHAOS = """
class Chaos(Net):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        if torch.compiler.is_compiling():
            return super().forward(x)
        return super().forward(x)

def _strike(what):
    def backend(graph, inputs):
        if what == "segfault":
            import ctypes
            ctypes.string_at(0)
        if what == "exit":
            print("about to leave", flush=True)
            os._exit(7)
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hangs":
            a_place_that_hangs()
        raise RuntimeError("backend says no")
    return backend

def a_place_that_hangs():
    while True:
        time.sleep(0.1)

segfault, exits, killed, hangs, raises = map(_strike, ["segfault", "exit", "killed", "hangs", "raises"])
"""
MATRIX = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
axes:
  backend: [eager, "models:segfault", "models:exits", "models:killed", "models:hangs", "models:raises", aot_eager]
"""


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["alone", "xdist"])
def test_each_disaster_is_one_cells_verdict(repo, workers):
    """Crash, exit, kill, hang and exception each get a verdict with evidence; the cells around them pass."""
    repo.models(CHAOS)
    repo.matrix(MATRIX)
    result = repo.run("--compile-timeout=25", *workers)
    assert result.ret == 1
    status = {cell["axes"]["backend"]: cell for cell in repo.block()["cells"]}
    found = {name: cell["status"] for name, cell in status.items()}
    assert found == {
        "eager": "pass", "aot_eager": "pass", "models:segfault": "crash", "models:exits": "crash",
        "models:killed": "crash", "models:hangs": "timeout", "models:raises": "fail",
    }
    failure = {name: cell["observation"]["failure"] for name, cell in status.items()}
    crash = r"segmentation fault \(SIGSEGV\) in string_at \(ctypes/__init__\.py:\d+\)"
    assert re.fullmatch(crash, failure["models:segfault"]["message"])
    assert "Fatal Python error" in failure["models:segfault"]["evidence"]
    assert failure["models:exits"]["message"] == "the process ended itself with exit code 7"
    assert "about to leave" in failure["models:exits"]["evidence"]
    assert "SIGKILL" in failure["models:killed"]["message"]
    assert "a_place_that_hangs" in failure["models:hangs"]["evidence"]
    raised = status["models:raises"]["checks"]
    assert "backend says no" in json.dumps(raised["compiles"])
    assert {check["verdict"] for check in raised.values()} == {"fail"}
    crashed = "*segmentation fault (SIGSEGV) in string_at (ctypes/__init__.py:*"
    result.stdout.fnmatch_lines([crashed, "*again  pytest --compile-matrix=*"])


def _pytest(repo, *args):
    command = [sys.executable, "-m", "pytest", "--compile-matrix", "-p", "no:cacheprovider", *args]
    return subprocess.Popen(command, cwd=repo.path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            start_new_session=True, preexec_fn=heed_ctrl_c)


def _wait_for(path, seconds=90):
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} never came")
        time.sleep(0.05)


SLOW = """
def slow(graph, inputs):
    with open("pid.txt.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename("pid.txt.new", "pid.txt")
    time.sleep(60)
    return graph.forward
"""
SLOW_MATRIX = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
axes:
  backend: [eager, "models:slow", aot_eager]
"""


def test_kill_9_on_a_rank_in_mid_run(repo):
    """kill -9 from outside on the rank process loses the cell that it ran, and the run goes on."""
    repo.models(SLOW)
    repo.matrix(SLOW_MATRIX)
    with _pytest(repo) as process:
        _wait_for(repo.path / "pid.txt")
        os.kill(int((repo.path / "pid.txt").read_text()), signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert [cell["status"] for cell in repo.block()["cells"]] == ["pass", "crash", "pass"]


def test_an_interrupted_run_keeps_what_finished(repo):
    """Ctrl-C: the report has the finished cells, the others are not_run, and no process is left."""
    repo.models(SLOW)
    repo.matrix(SLOW_MATRIX)
    with _pytest(repo) as process:
        _wait_for(repo.path / "pid.txt")
        pid = int((repo.path / "pid.txt").read_text())
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert [cell["status"] for cell in repo.block()["cells"]] == ["pass", "not_run", "not_run"]
    _gone(pid)


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_killed_pytest_leaves_a_journal_and_no_process(repo, workers):
    """kill -9 on pytest itself: what finished is in the journal, and the rank dies with it."""
    repo.models(SLOW)
    repo.matrix(SLOW_MATRIX)
    with _pytest(repo, *workers) as process:
        _wait_for(repo.path / "pid.txt")
        if workers:
            time.sleep(5)  # the other worker has long finished the other cells
        pid = int((repo.path / "pid.txt").read_text())
        process.kill()
        process.communicate(timeout=120)
    lines = [json.loads(line) for line in (repo.path / ".compile-matrix/journal.jsonl").read_text().splitlines()]
    assert lines[0]["kind"] == "plan"
    finished = {line["cell"] for line in lines[1:]}
    assert "net-eager-default-auto-none" in finished
    assert "net-models_slow-default-auto-none" not in finished
    _gone(pid)
    _gone(-process.pid)  # its process group: the xdist workers


def _gone(pid, seconds=10):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")
