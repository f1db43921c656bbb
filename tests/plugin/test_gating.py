"""A release manager's day: shards of a smoke matrix, a regression, the gate, the diff beside an earlier run."""

from __future__ import annotations

import json

import pytest

from pytest_torchcompile.cli import main
from pytest_torchcompile.report.provenance import is_sealed
from pytest_torchcompile.report.reading import read_report

pytestmark = pytest.mark.needs_torch
SMOKE = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: {choices: [4, 6]}}}
axes:
  backend: [eager]
  dynamic: [auto, dynamic]
checks: [compiles, graph_breaks, recompiles]
"""
BROKEN = """
class Net(Net):
    def forward(self, x):
        h = torch.relu(self.inner(x))
        if h.mean().item() > 9:
            h = h / 2
        return self.outer(h)
"""


def shard(repo, index):
    """Run one of two shards; returns the report, kept under a name of its own."""
    repo.run("-p", "no:xdist", f"--compile-shard={index}/2")
    kept = repo.path / f"report-{index}.json"
    (repo.path / ".compile-matrix/report.json").rename(kept)
    return str(kept)


def test_two_shards_and_a_planted_regression(repo, capsys):
    """The gate passes the good run, and names the model and the line of the bad one first."""
    repo.matrix(SMOKE)
    good = [shard(repo, 1), shard(repo, 2)]
    capsys.readouterr()  # what the runs printed
    assert main(["gate", *good]) == 0
    assert capsys.readouterr().out.startswith("PASS: the 2 cells of matrix/default.yaml are good")
    assert main(["gate", good[0]]) == 2
    assert all(read_report(name).sealed for name in good)
    repo.models(BROKEN)
    bad = [good[0], shard(repo, 2)]
    capsys.readouterr()
    assert main(["gate", *bad]) == 2  # the first shard is of the model as it was
    assert "they imported different contents of models.py" in capsys.readouterr().out
    bad[0] = shard(repo, 1)
    capsys.readouterr()
    assert main(["gate", *bad]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("FAIL: 1 model has graph breaks (net, models.py:")


def test_more_shards_than_cells(repo):
    """A shard without cells is as planned: its machine succeeds, and leaves a report for the gate."""
    repo.matrix(SMOKE)
    assert repo.run("-p", "no:xdist", "--compile-shard=3/3").ret == 0
    assert read_report(str(repo.path / ".compile-matrix/report.json")).block["cells"] == []
    assert repo.run("-p", "no:xdist", "-k", "nothing").ret == 5


def test_the_diff_beside_a_baseline(repo):
    """`--compile-baseline` prints it at the end; a mistake in its name costs no run."""
    repo.matrix(SMOKE)
    repo.run("-p", "no:xdist")
    (repo.path / ".compile-matrix/report.json").rename(repo.path / "last.json")
    repo.models(BROKEN)
    result = repo.run("-p", "no:xdist", "--compile-baseline=last.json")
    result.stdout.fnmatch_lines(["*beside last.json*", "graph_breaks held in the baseline and fails now in 2 cells*",
                                 "new graph break at models.py:* in 2 cells: *"])
    result = repo.run("--compile-baseline=lost.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--compile-baseline: *lost.json: no such file; did you mean *last.json*"])


def test_a_report_without_pytest_json_report(repo):
    """Our block is complete by itself, and sealed."""
    repo.matrix(SMOKE)
    repo.run("-p", "no:xdist", "-p", "no:pytest_jsonreport")
    path = repo.path / ".compile-matrix/report.json"
    assert is_sealed(path.read_bytes())
    assert list(json.loads(path.read_text())) == ["compile_matrix", "compile_matrix_seal"]
    assert main(["gate", str(path)]) == 0
    assert not list(path.parent.glob(".report*"))  # what it was written to first is gone
