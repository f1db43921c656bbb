"""Cells of several ranks in a run of pytest: items, report, gate, Ctrl-C, and machines that can't."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ctrl_c import heed_ctrl_c

from pytest_torchcompile.report.schema import report_schema

pytestmark = pytest.mark.needs_torch
FAULTS = Path(__file__).parents[1] / "ranks" / "rank_faults.py"
MATRIX = """
version: 1
models:
  net: {{factory: "rank_faults:Net", inputs: "rank_faults:rows", dims: {{B: {{choices: [4, 6]}}}}}}
axes:
  backend: [eager]
  wrapper: [{wrappers}]
  device: [{device}]
checks: [compiles, equivalence, gradients, smoketest, rank_divergence]
"""


@pytest.fixture
def ranks(repo):
    """A repository with the wrappers of rank_faults, and a function that writes its matrix."""
    shutil.copy(FAULTS, repo.path)

    def matrix(*wrappers, device="cpu"):
        repo.matrix(MATRIX.format(wrappers=", ".join(f'"{w}"' for w in wrappers), device=device))
        return repo

    return matrix


def test_a_run_with_ranks(ranks):
    """Each kind of cell has its checks; a rank that dies is one cell's verdict; the gate judges the report again."""
    jsonschema = pytest.importorskip("jsonschema")
    repo = ranks("none", "rank_faults:dies*2", "rank_faults:right*2")
    result = repo.run("--compile-timeout=60")
    assert result.ret == 1
    one, dies, right = repo.block()["cells"]
    assert [cell["status"] for cell in (one, dies, right)] == ["pass", "crash", "pass"]
    assert set(one["checks"]) == {"compiles", "equivalence", "gradients", "smoketest"}
    assert set(right["checks"]) == {"compiles", "equivalence", "gradients", "rank_divergence"}
    assert right["id"] == "net-eager-default-auto-rank_faults_right_2"
    assert one["observation"]["ranks"] == []
    (other,) = right["observation"]["ranks"]
    assert set(other["sections"]) >= {"compiles", "equivalence", "gradients", "rank_divergence"}
    assert "failed_at" not in right["observation"]
    result.stdout.fnmatch_lines(["*rank 1: killed, perhaps for want of memory (SIGKILL)*"])
    jsonschema.validate(json.loads((repo.path / ".compile-matrix/report.json").read_text()), report_schema())
    gate = subprocess.run([sys.executable, "-m", "pytest_torchcompile", "gate", ".compile-matrix/report.json"],
                          cwd=repo.path, capture_output=True, text=True, check=False)
    assert gate.returncode == 1, gate.stderr
    assert "rank_faults_right_2" not in gate.stdout, "the gate says of the cell that passed what the run did not say"
    assert not list((repo.path / ".compile-matrix").glob("repro/*")), "a file of one process would show nothing"


def test_ctrl_c_leaves_no_rank(ranks):
    """The report keeps what finished, and every rank process ends."""
    repo = ranks("none", "rank_faults:hangs*2", "rank_faults:right*2")
    environment = os.environ | {"CHAOS_HANGS": str(repo.path / "hangs"), "RANKS_RUN": str(repo.path)}
    process = subprocess.Popen([sys.executable, "-m", "pytest", "--compile-matrix", "-p", "no:cacheprovider"],
                               cwd=repo.path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, start_new_session=True, preexec_fn=heed_ctrl_c)
    with process:
        deadline = time.monotonic() + 120
        while not (repo.path / "hangs").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    assert [cell["status"] for cell in repo.block()["cells"]] == ["pass", "not_run", "not_run"]
    _nobody(f"RANKS_RUN={repo.path}")


def _nobody(mark, seconds=10):
    """Wait until no process has this in its environment."""
    deadline = time.monotonic() + seconds
    while left := [path for path in Path("/proc").glob("[0-9]*/environ") if mark.encode() in _environment(path)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _environment(path):
    try:
        return path.read_bytes().split(b"\0")
    except OSError:
        return []


def test_pytests_own_process_has_no_ranks(ranks):
    """With --compile-inprocess such a cell is skipped, and says why."""
    repo = ranks("none", "ddp")
    result = repo.run("--compile-inprocess", "-rs")
    assert [cell["status"] for cell in repo.block()["cells"]] == ["pass", "skip"]
    result.stdout.fnmatch_lines(["*wrapper 'ddp' needs 2 rank processes; --compile-inprocess has none*"])


@pytest.mark.parametrize(("wrapper", "device", "kind", "text"), [
    pytest.param("ddp", "cuda", "skip", "device 'cuda' is not here: torch.cuda.is_available() is false",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")),
    ("ddp", "cuda:0", "usage", "wrapper 'ddp' takes one GPU for each rank, and device 'cuda:0' names one"),
    ("rank_faults:drifts", "cpu", "usage", "wrapper 'rank_faults:drifts' is made for 2, 3, 4, ... ranks, "
                                           "and the matrix gives it 1; write rank_faults:drifts*2"),
])
def test_what_cannot_be_says_so(ranks, wrapper, device, kind, text):
    """Fewer GPUs than ranks is a skip; a matrix that asks for what makes no sense is a mistake in it."""
    repo = ranks(wrapper, device=device)
    repo.run()
    (cell,) = repo.block()["cells"]
    failure = cell["observation"]["failure"]
    assert failure["kind"] == kind
    assert text in failure["message"]


def test_replicas_that_have_the_same_batch(ranks):
    """Gradients that nobody averages would be right: it is refused, where ranks are replicas and train."""
    repo = ranks("rank_faults:right*2")
    with (repo.path / "rank_faults.py").open("a") as file:
        file.write("\n\ndef fixed(B):\n    return torch.randn(B, 8, generator=torch.Generator().manual_seed(B))\n")
    matrix = repo.path / "matrix/default.yaml"
    matrix.write_text(matrix.read_text().replace("rank_faults:rows", "rank_faults:fixed"))
    assert repo.run("--compile-timeout=60").ret == pytest.ExitCode.USAGE_ERROR
    (cell,) = repo.block()["cells"]
    assert cell["status"] == "error"
    assert ("inputs 'rank_faults:fixed' gives all 2 replicas the same batch, so nobody could tell whether gradients "
            "are averaged; have it draw") in cell["checks"]["gradients"]["problems"][0]["message"]
