"""--compile-ranks torchrun: two agents of torchrun on the loopback, as two nodes, run one rank of each cell."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from typing import ClassVar

import pytest
import torch

from pytest_torchcompile.observation import Job, RankOutcome
from pytest_torchcompile.ranks.torchrun import Nodes, Torchrun

pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()) or sys.platform != "linux",
        reason="needs torch.distributed with gloo, and the name of Linux' loopback device"),
]

MODELS = """
from torch._dynamo.backends.registry import lookup_backend

def refuses_on_rank_1(graph, inputs):
    if os.environ["RANK"] == "1":
        raise RuntimeError("planted: rank 1 compiles nothing")
    return lookup_backend("aot_eager")(graph, inputs)

def refuses_while_rank_0_sleeps(graph, inputs):
    if os.environ["RANK"] == "0":
        __import__("time").sleep(1000)
    raise RuntimeError("planted: rank 1 compiles nothing")

def dies_on_rank_1(graph, inputs):
    if os.environ["RANK"] == "1":
        os._exit(7)
    return lookup_backend("aot_eager")(graph, inputs)
"""
MATRIX = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
axes:
  device: [DEVICE]
  backend: [aot_eager, "models:refuses_on_rank_1", "models:refuses_while_rank_0_sleeps", "models:dies_on_rank_1"]
  dynamic: [static]
  wrapper: [none, ddp, "ddp*4"]
rules:
  - exclude:
      backend: ["models:refuses_on_rank_1", "models:refuses_while_rank_0_sleeps", "models:dies_on_rank_1"]
      wrapper: [none, "ddp*4"]
    reason: one fault at a time
checks: [compiles, equivalence, gradients, graph_breaks, recompiles, rank_divergence]
"""
LIMIT = 240
"""Seconds for two nodes on a machine with other work; they take about 20."""


def nodes(repo, *options):
    """Run the matrix on two nodes, each with the GPU of its number; their exit codes and what they wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = []
    for node in range(2):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
            "--rdzv-backend", "c10d", "--rdzv-id", "matrix", "--rdzv-endpoint", f"127.0.0.1:{port}",
            "--local-addr", "127.0.0.1", "--rdzv-conf", f"is_host={'true' if node == 0 else 'false'}",
            "-m", "pytest", "-p", "no:cacheprovider", "--compile-matrix", "--compile-ranks", "torchrun", *options,
        ]  # fmt: skip
        with (repo.path / f"node{node}.log").open("wb") as log:
            own = environment | {"CUDA_VISIBLE_DEVICES": str(node)}
            started.append(subprocess.Popen(command, cwd=repo.path, env=own, stdout=log, stderr=log,
                                            start_new_session=True))
    try:
        codes = [each.wait(LIMIT) for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    return codes, [(repo.path / f"node{node}.log").read_text() for node in range(2)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs"))])
def test_two_nodes(repo, device):
    """A healthy cell passes on both ranks, what fails or dies on node 1 is its cell's verdict; rank 0 reports."""
    repo.models(MODELS)
    repo.matrix(MATRIX.replace("DEVICE", device))
    codes, logs = nodes(repo)
    assert codes[0] == 1, logs
    cells = {cell["id"].removesuffix(f"-{device}"): cell for cell in repo.block()["cells"]}
    told = "\n".join(logs)
    assert {name: cell["status"] for name, cell in cells.items()} == {
        "net-aot_eager-default-static-none": "skip",
        "net-aot_eager-default-static-ddp": "pass",
        "net-aot_eager-default-static-ddp_4": "skip",
        "net-models_refuses_on_rank_1-default-static-ddp": "fail",
        "net-models_refuses_while_rank_0_sleeps-default-static-ddp": "fail",
        "net-models_dies_on_rank_1-default-static-ddp": "crash",
    }, told
    healthy = cells["net-aot_eager-default-static-ddp"]["observation"]
    (other,) = healthy["ranks"]
    assert all(any(graph["runs"] for graph in rank["sections"]["compiles"]["graphs"]) for rank in (healthy, other))
    note = cells["net-aot_eager-default-static-ddp_4"]["checks"]["compiles"]["note"]
    assert note == "it has 4 ranks, and torchrun has started 2"
    problem = cells["net-models_refuses_on_rank_1-default-static-ddp"]["checks"]["compiles"]["problems"][0]
    assert problem["message"].startswith("rank 1: the compiled run raised")
    assert "planted" in problem["message"]
    # rank 0 waits for nobody, so that no broken connection tells it; it is ended all the same
    problem = cells["net-models_refuses_while_rank_0_sleeps-default-static-ddp"]["checks"]["compiles"]["problems"][0]
    assert problem["message"].startswith("rank 1: the compiled run raised")
    problem = cells["net-models_dies_on_rank_1-default-static-ddp"]["checks"]["compiles"]["problems"][0]
    assert "rank 1" in problem["message"]
    assert "exit code 7" in problem["message"] + problem["evidence"], problem
    # what the other node saw lies beside, and agrees
    theirs = {cell["id"].removesuffix(f"-{device}"): cell["status"]
              for cell in repo.block(".compile-matrix/rank1/report.json")["cells"]}
    assert theirs == {name: cell["status"] for name, cell in cells.items()}


class Stub:
    """A rank process that is always done at once; what it was asked is in ``asked``."""

    asked: ClassVar[list] = []

    def __init__(self, folder):
        self.last = ""

    def begin(self, job):
        self.last = job["do"]
        self.asked.append(job)
        mine, its = multiprocessing.Pipe()
        its.close()
        return mine

    def finish(self):
        done = {"failure": None, "sections": {}}
        return RankOutcome("done", done if self.last == "cell" else None)

    def run(self, job, timeout):
        self.asked.append(job)
        return RankOutcome("done", [job["mine"]] * job["world"])

    def close(self):
        pass


def test_a_cell_that_is_run_again_meets_elsewhere(monkeypatch, tmp_path):
    """The store keeps what was told of the first run (pytest-rerunfailures, pytest-repeat): a rank that crashes in the
    second would be taken for the one that was well.
    """
    monkeypatch.setattr("pytest_torchcompile.ranks.torchrun.Rank", Stub)
    monkeypatch.setattr(Stub, "asked", [])
    nodes = Nodes(tmp_path, Torchrun(0, 2, 0, "tcp://here:1/run/0"))
    job = Job(cell={"model": "net"}, entry={}, root="", checks=())
    for _ in range(2):
        nodes.run(job, 2, [], 5.0)
    for do in ("watch", "tell"):
        places = [each["meeting"] for each in Stub.asked if each["do"] == do]
        assert len(places) == 2
        assert places[0] != places[1], do
    groups = [each["job"].rendezvous for each in Stub.asked if each["do"] == "cell"]
    assert len(set(groups)) == 2


@pytest.mark.parametrize(("options", "text"), [
    (["--compile-ranks", "torchrun"], "this pytest was not started by torchrun (RANK, *expected for example torchrun*"),
    (["--compile-ranks", "torchrn"], "--compile-ranks: 'torchrn' is not a place for ranks; did you mean 'torchrun'*"),
    (["--compile-ranks", "torchrun", "--compile-inprocess"], "*leave out --compile-inprocess*"),
    (["--compile-ranks", "torchrun", "-n", "2"], "*every node runs the cells in the same order; leave out -n*"),
])
def test_mistakes(repo, options, text):
    """What can't be is told before anything runs."""
    result = repo.run(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{text}"])
