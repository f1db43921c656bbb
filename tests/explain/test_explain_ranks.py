"""Cells of several ranks explained: by as many processes of torchrun's, or by one where the others are fake."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.cli import main
from pytest_torchcompile.explain.command import explain_cell
from pytest_torchcompile.explain.explanation_text import explanation_lines
from pytest_torchcompile.explain.files import write_files
from pytest_torchcompile.explain.roofline import Roofline
from pytest_torchcompile.plan.matrix import load_matrix

pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.skipif(not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
                       reason="needs torch.distributed with gloo"),
    # Dynamo makes one when it traces an autograd function of the wrapper (torch 2.13).
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
MATRIX = """
version: 1
models:
  net: {factory: "pytest_torchcompile.zoo:feed_forward", inputs: "pytest_torchcompile.zoo:vector_batch", dims: {B: 8}}
axes:
  backend: [inductor, aot_eager]
  wrapper: [tp, simple_fsdp+tp*fake4]
  dynamic: [static]
"""
LIMIT = 240
"""Seconds for two ranks on a machine with other work; they take about 20."""


@pytest.fixture
def matrix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "m.yaml"
    file.write_text(MATRIX)
    return load_matrix(file, tmp_path)


def test_fake_ranks(matrix, tmp_path):
    """Collectives are told as what they are, and bounded by no peak of this machine."""
    cell = Cell(model="net", backend="inductor", wrapper="simple_fsdp+tp*fake4", dynamic="static")
    found = explain_cell(matrix, SimpleNamespace(cell=cell))
    assert not found.error
    kernels = {kernel.name: (kernel.kind, kernel.library) for kernel in found.kernels}
    assert kernels["_c10d_functional.reduce_scatter_tensor.default"] == ("library", "collective")
    assert kernels["_c10d_functional.wait_tensor.default"] == ("library", "collective")
    text = "\n".join(explanation_lines(found))
    assert "library call, collective" in text
    assert "could not be read: seconds of single kernels of several ranks" in text
    roofline = Roofline.of(found, "cpu")
    assert not [roof.name for roof in roofline.kernels if "c10d" in roof.name]
    assert roofline.collectives["_c10d_functional.reduce_scatter_tensor.default"] > 0
    assert "_c10d_functional.wait_tensor.default" not in roofline.collectives
    last = list(roofline.lines())[-1]
    assert last.startswith("  without the collectives, which the links between ranks bound: ")
    # A graph cannot run by itself.
    written = write_files(found, tmp_path / ".compile-matrix" / "explain" / "net", roofline=roofline)
    assert "index.html" in {file.name for file in written}
    assert not [file.name for file in written if "runnable" in file.name]
    assert "could not be read: graphs as programs of their own: their collectives need the other ranks" in text


def test_ranks_of_torchrun(matrix, tmp_path):
    """Two processes compile, one tells."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pytest_torchcompile",
               "explain", "net-aot_eager-default-static-tp", "--matrix", str(matrix.path)]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("all stages side by side") == 1
    folder = tmp_path / ".compile-matrix" / "explain" / "net-aot_eager-default-static-tp"
    # Tensor parallel: the collective is in the graph that rank 0 tells of.
    assert "all_reduce" in (folder / "index.html").read_text()


@pytest.mark.parametrize(("given", "said"), [
    ({}, "needs 2 processes, and this is one; run torchrun --nproc-per-node 2 -m pytest_torchcompile explain "
         "net-inductor-default-static-tp, or name a cell of this model with fake ranks or wrapper none"),
    ({"WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1",
      "TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"},
     "needs 2 processes, and torchrun has started 3; run torchrun --nproc-per-node 2 "),
])  # fmt: skip
def test_other_numbers_of_processes(matrix, monkeypatch, capsys, given, said):
    """The command that would do is told."""
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main(["explain", "net-inductor-default-static-tp", "--matrix", str(matrix.path)]) == 4
    assert said in capsys.readouterr().err


def test_id_of_a_test_names_its_cell(matrix, capsys):
    """What pytest prints can be pasted."""
    name = "m.yaml::net-inductor-default-static-tq::compiles"
    assert main(["explain", name, "--matrix", str(matrix.path)]) == 4
    assert "'net-inductor-default-static-tq' is neither a cell of" in capsys.readouterr().err
