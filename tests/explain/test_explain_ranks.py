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
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.explain import command
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
BROKEN_ON_RANK_1 = """
import os
from pytest_torchcompile.zoo import feed_forward as net
from torch._dynamo.backends.registry import lookup_backend

def refuses_on_rank_1(graph, inputs):
    if os.environ["RANK"] == "1":
        raise RuntimeError("planted: rank 1 compiles nothing")
    return lookup_backend("eager")(graph, inputs)
"""
LIMIT = 240
"""Seconds for two ranks on a machine with other work; they take about 20."""


@pytest.fixture
def matrix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "m.yaml"
    file.write_text(MATRIX)
    return load_matrix(file, tmp_path)


def explained_by_two(cell, file):
    """What `explain` of a cell ends with in two processes of torchrun's, in the folder of its matrix."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pytest_torchcompile",
               "explain", cell, "--matrix", str(file)]
    return subprocess.run(command, cwd=file.parent, env=environment, capture_output=True, text=True, timeout=LIMIT)


def test_a_wrapper_that_cannot_be_used_is_a_mistake_and_no_finding(tmp_path, monkeypatch, capsys):
    """The model has no ``tp_plan``: exit code 4, the sentence of the wrapper, no files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planless.py").write_text("import torch\nnet = torch.nn.Identity\nbatch = lambda: torch.ones(2)\n")
    (tmp_path / "m.yaml").write_text(
        "{version: 1, models: {net: {factory: 'planless:net', inputs: 'planless:batch', dims: {}}},"
        " axes: {backend: [eager], wrapper: [tp*fake2]}}")
    assert main(["explain", "net-eager-default-auto-tp_fake2", "--matrix", "m.yaml"]) == 4
    assert "tp_plan names, and model 'net' has none; give it one, such as" in capsys.readouterr().err
    assert not (tmp_path / ".compile-matrix").exists()


@pytest.mark.slow
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
    assert "could not be read: seconds of single kernels of fake ranks: their collectives do nothing" in text
    sending = next(kernel for kernel in found.kernels if "reduce_scatter" in kernel.name)
    assert [operator.target for operator in sending.operators] == ["_c10d_functional.reduce_scatter_tensor.default"]
    # A wait moves nothing.
    waiting = [kernel for kernel in found.kernels if kernel.waits]
    assert [(kernel.reads, kernel.writes) for kernel in waiting] == [((), ())] * len(waiting) != []
    roofline = Roofline.of(found, "cpu")
    assert not [roof.name for roof in roofline.kernels if "c10d" in roof.name]
    assert roofline.collectives["_c10d_functional.reduce_scatter_tensor.default"] > 0
    assert "_c10d_functional.wait_tensor.default" not in roofline.collectives
    first = next(roofline.lines())
    assert first.startswith("collectives, which the links between ranks bound and no roof: ")
    # A graph cannot run by itself.
    written = write_files(found, tmp_path / ".compile-matrix" / "explain" / "net", roofline=roofline)
    assert "index.html" in {file.name for file in written}
    assert not [file.name for file in written if "runnable" in file.name]
    assert "could not be read: graphs as programs of their own: their collectives need the other ranks" in text


def test_ranks_of_torchrun(matrix, tmp_path):
    """Two processes compile, one tells."""
    ended = explained_by_two("net-aot_eager-default-static-tp", matrix.path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("all stages side by side") == 1
    folder = tmp_path / ".compile-matrix" / "explain" / "net-aot_eager-default-static-tp"
    # Tensor parallel: the collective is in the graph that rank 0 tells of.
    assert "all_reduce" in (folder / "index.html").read_text()


@pytest.mark.slow
def test_an_error_of_one_rank_is_told(tmp_path):
    """Also where rank 0 waits in a collective for that rank, and can't tell anything."""
    (tmp_path / "models.py").write_text(BROKEN_ON_RANK_1)
    file = tmp_path / "m.yaml"
    file.write_text(MATRIX.replace("pytest_torchcompile.zoo:feed_forward", "models:net").replace(
        "aot_eager", "models:refuses_on_rank_1"))
    ended = explained_by_two("net-models_refuses_on_rank_1-default-static-tp", file)
    assert ended.returncode == 1
    assert "rank 1: " in ended.stderr
    assert "planted: rank 1 compiles nothing" in ended.stderr


@pytest.mark.parametrize(("given", "said"), [
    ({}, "needs 2 processes, and this is one; run torchrun --nproc-per-node 2 -m pytest_torchcompile explain "
         "net-inductor-default-static-tp --matrix "),
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


def test_one_process_is_enough(matrix, monkeypatch, capsys):
    """Four processes would write into one folder."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")
    assert main(["explain", "net-inductor-default-static-simple_fsdp+tp_fake4", "--matrix", str(matrix.path)]) == 4
    assert "runs in one process, and torchrun has started 4; leave torchrun out" in capsys.readouterr().err


def test_id_of_a_test_names_its_cell(matrix, capsys):
    """What pytest prints can be pasted."""
    name = "m.yaml::net-inductor-default-static-tq::compiles"
    assert main(["explain", name, "--matrix", str(matrix.path)]) == 4
    assert "'net-inductor-default-static-tq' is neither a cell of" in capsys.readouterr().err
    assert main(["explain", f"other.yaml::{name.partition('::')[2]}", "--matrix", str(matrix.path)]) == 4
    assert "is a test of other.yaml, and --matrix names" in capsys.readouterr().err
    # Without --matrix its file is read.
    assert main(["explain", name]) == 4
    assert "m.yaml nor module:factory" in capsys.readouterr().err
    # As a heading of a failure has it.
    assert main(["explain", name.partition("::")[2], "--matrix", str(matrix.path)]) == 4
    assert "'net-inductor-default-static-tq' is neither a cell of" in capsys.readouterr().err
    assert main(["explain", "shipped:fake::net-tq::compiles"]) == 4
    assert "'net-tq' is neither a cell of" in (said := capsys.readouterr().err)
    assert "fake.yaml" in said
    assert main(["explain", "net-tq"]) == 4
    assert "name another matrix by --matrix FILE, or the cell as FILE::CELL" in capsys.readouterr().err


def test_a_terminal_is_told_that_it_compiles(matrix, monkeypatch, capsys):
    """Nothing else is printed for minutes."""
    def compiles(*given):
        raise UsageError("compiled")

    monkeypatch.setattr(command, "explain_cell", compiles)
    asked = ["explain", "net-inductor-default-static-simple_fsdp+tp_fake4", "--matrix", str(matrix.path)]
    assert main(asked) == 4
    assert capsys.readouterr().err == "compiled\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(asked) == 4
    told, _ = capsys.readouterr().err.splitlines()
    assert told == "compiling net-inductor-default-static-simple_fsdp+tp_fake4: a large model takes minutes"
