"""Faults of our own processes cost one cell at most, and are told in one sentence."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.needs_torch
FAULTS = """
import subprocess, sys

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

def zygote_dies(graph, inputs):
    os.kill(os.getppid(), signal.SIGKILL)
    return graph.forward

def leaves(graph, inputs):
    left = [subprocess.Popen(SLEEP).pid]
    daemon = "import os, subprocess, sys; os.setsid(); print(subprocess.Popen(sys.argv[1:], stdout=2).pid)"
    left.append(int(subprocess.run([sys.executable, "-c", daemon, *SLEEP], stdout=subprocess.PIPE, check=True).stdout))
    with open("left", "w") as file:
        print(*left, file=file)
    return graph.forward

def looks(graph, inputs):
    with open("left") as file:
        left = file.read().split()
    with open("found", "w") as file:
        print(len(left), *(pid for pid in left if os.path.exists(f"/proc/{pid}")), file=file)
    return graph.forward
"""
MATRIX = """
version: 1
models:
  net: {{factory: "models:net", inputs: "models:batch", dims: {{B: 4}}}}
axes:
  backend: [{backends}]
checks: [compiles]
"""


def statuses(repo):
    """Of the cells, by the backend's name."""
    return {cell["axes"]["backend"]: cell["status"] for cell in repo.block()["cells"]}


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_killed_zygote_costs_no_cell(repo, workers):
    """The next process comes from another zygote; the summary says so."""
    repo.models(FAULTS)
    repo.matrix(MATRIX.format(backends="'models:zygote_dies', eager, aot_eager"))
    result = repo.run("--compile-isolation=cell", *workers)
    assert result.ret == 0
    assert statuses(repo) == {"models:zygote_dies": "pass", "eager": "pass", "aot_eager": "pass"}
    result.stdout.fnmatch_lines(["*the process that starts rank processes was killed*and started again"])


def test_a_zygote_that_is_killed_again(repo):
    """What comes after is an error, told by one sentence for all cells together."""
    repo.models(FAULTS + "\nagain = lambda graph, inputs: zygote_dies(graph, inputs)\n")
    repo.matrix(MATRIX.format(backends="'models:zygote_dies', 'models:again', eager, aot_eager"))
    result = repo.run("--compile-isolation=cell")
    assert result.ret == 1
    assert statuses(repo) == {"models:zygote_dies": "pass", "models:again": "pass", "eager": "error",
                              "aot_eager": "error"}
    text = result.stdout.str()
    assert text.count("the process that starts rank processes was killed 2 times, and is not started again") == 1
    assert "Traceback" not in text


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_torch_that_cannot_be_imported_is_told_once(repo, workers, monkeypatch):
    """One line for any number of checks of any number of cells; every verdict is an error."""
    repo.file("stub/torch/__init__.py", "raise ImportError('libtorch_cuda.so: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(repo.path / "stub"),
                                                                   os.environ.get("PYTHONPATH")])))
    many = MATRIX.replace("checks: [compiles]", "  mode: [default, reduce-overhead, max-autotune]")
    repo.matrix(many.format(backends="eager, aot_eager, inductor"))
    result = repo.run(*workers)
    assert result.ret == 1
    cells = repo.block()["cells"]
    assert {cell["status"] for cell in cells} == {"error"}
    assert {cell["observation"]["failure"]["kind"] for cell in cells} == {"no_rank"}
    text = result.stdout.str() + result.stderr.str()
    assert text.count("ImportError: libtorch_cuda.so") == 1
    assert "torch cannot be imported by " in text
    assert "Traceback" not in text
    assert len(text.splitlines()) < 40


def test_what_a_cell_left_behind_ends_with_it(repo):
    """Its child, and a daemon in a session of its own; the process of the cell is used again."""
    repo.models(FAULTS)
    repo.matrix(MATRIX.format(backends="'models:leaves', 'models:looks'"))
    result = repo.run()
    assert result.ret == 0
    assert (repo.path / "found").read_text() == "2\n"
