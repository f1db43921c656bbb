"""The repositories in ``examples/`` run as they are: their own tests, and one cell of each matrix."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python

from pytest_torchcompile.gate.policyfile import parse_policy
from pytest_torchcompile.plan.matrix import load_matrix

pytestmark = pytest.mark.needs_torch
FOLDER = Path(__file__).parents[2] / "examples"
INFERENCE = "compile_cell(backend='aot_eager', phase='inference')"
MATRICES = {"gpt": f"{INFERENCE} and compile_cell(dynamic='auto')", "transformers_bert": INFERENCE, "vision": INFERENCE}
"""What has a matrix, and which one of its cells is run."""
NEEDS = {"transformers_bert": "transformers"}
"""What an example imports beside torch."""


def copied(name: str, folder: Path) -> Path:
    """A copy of the example, in which reports may be written."""
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"this example needs {NEEDS[name]}, which is not installed")
    return Path(shutil.copytree(FOLDER / name, folder / name))


@pytest.fixture
def run(warm):
    """Runs pytest in an example."""

    def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *arguments]
        environment = {**os.environ}
        if warm:
            environment |= warm_python.inner_variables(warm["torch"])
        return warm_python.run_python(warm.get("both"), command, cwd=folder, env=environment)

    return run_pytest


def test_every_example_is_tested_and_told():
    """In this file, and in the table of the folder's README."""
    names = {path.name for path in FOLDER.iterdir() if path.is_dir() and (path / "pyproject.toml").exists()}
    assert names == {*MATRICES, "graph_pass"}
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"[{name}]({name})" in table for name in names)


@pytest.mark.parametrize("name", MATRICES)
def test_matrix_and_policy_are_read(name):
    """All of their cells, also those that no test runs; the policy is of this matrix."""
    matrix = load_matrix(FOLDER / name / "matrix/default.yaml", FOLDER / name)
    assert {planned.cell.backend for planned in matrix.cells} == {"aot_eager", "inductor"}
    policy = (FOLDER / name / "release.yaml").read_bytes()
    assert parse_policy(policy, "release.yaml").matrix == "matrix/default.yaml"


@pytest.mark.parametrize("name", MATRICES)
def test_example_runs(name, tmp_path, run):
    """Its test with fixtures, and a cell of inference that passes and has compiled something."""
    folder = copied(name, tmp_path)
    done = run(folder, "--compile-matrix", ".", "--compile-checks=compiles,equivalence",
               "-m", f"not compile_cell or {MATRICES[name]}")
    assert done.returncode == 0, done.stdout
    report = json.loads((folder / ".compile-matrix/report.json").read_text(encoding="utf-8"))
    passed = [cell for cell in report["compile_matrix"]["cells"] if cell["status"] == "pass"]
    assert len(passed) == 1
    assert passed[0]["observation"]["sections"]["compiles"]
    assert " passed" in done.stdout


def test_the_graph_pass_runs(tmp_path, run):
    """A right pass, and a wrong one."""
    done = run(copied("graph_pass", tmp_path))
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


@pytest.mark.parametrize("name", ["diffusers_unet", "transformers_gpt2", "x_transformers"])
def test_what_was_adopted_is_read(name):
    """A matrix that `init` wrote some versions ago still has three cells: one for each backend."""
    folder = FOLDER / "adopted" / name
    planned = load_matrix(folder / "matrix/default.yaml", folder).cells
    assert [each.cell.backend for each in planned] == ["eager", "aot_eager", "inductor"]
