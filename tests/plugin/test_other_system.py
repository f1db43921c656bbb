"""A whole run on a system without fork, signals that kill, file locks, named pipes and /proc, and what judges it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from other_system import site_folder

pytestmark = pytest.mark.needs_torch
TEST = """
import pytest, torch
from models import net

@pytest.fixture
def model():
    return net()

@pytest.mark.compile_modes("default", backend="eager")
def test_it(compiled_model, recompile_counter):
    assert compiled_model(torch.randn(4, 6)).shape == (4, 3)
    assert recompile_counter.count == 0
"""
MATRIX = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
  ends: {factory: "models:ends", inputs: "models:batch", dims: {B: 4}}
axes:
  backend: [eager]
rules:
  - xfail: {model: ends}
    reason: it ends its process
checks: [compiles, equivalence]
"""


@pytest.mark.slow
def test_nothing_ends_in_an_internal_error(repo, tmp_path):
    """Fixtures and cells run, a crash is its cell's verdict, and gate and page take the report."""
    repo.models("""
        class Ends(Net):
            def forward(self, x):
                os._exit(3)

        def ends():
            return Ends()
    """)
    repo.file("test_it.py", TEST)
    repo.matrix(MATRIX)
    site = str(site_folder(tmp_path))

    def type_command(*command):
        done = subprocess.run([sys.executable, "-m", *command], cwd=repo.path, text=True, capture_output=True,
                              env={**os.environ, "PYTHONPATH": site})
        assert "INTERNALERROR" not in done.stdout
        assert "Traceback" not in done.stderr
        return done

    run = type_command("pytest", "--compile-matrix", "test_it.py", "-p", "no:randomly", "-n0")
    assert run.returncode == 0, run.stdout
    report = json.loads((repo.path / ".compile-matrix/report.json").read_text(encoding="utf-8"))
    cells = {cell["axes"]["model"]: cell for cell in report["compile_matrix"]["cells"]}
    assert cells["net"]["status"] == "pass"
    assert cells["net"]["observation"]["leaks"] == []
    assert cells["ends"]["status"] == "xfail"
    assert "exit code 3" in json.dumps(cells["ends"])
    gate = type_command("pytest_torchcompile", "gate", ".compile-matrix/report.json")
    assert gate.stdout.startswith("PASS"), gate.stdout
    type_command("pytest_torchcompile", "html", ".compile-matrix/report.json", "-o", "page.html")
    assert "<html" in (repo.path / "page.html").read_text(encoding="utf-8")
