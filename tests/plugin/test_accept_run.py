"""`accept` after a real run: the next run is green, and to accept again changes nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs_torch


def test_the_next_run_is_green(repo):
    """A graph break, a counter that recompiles, and what follows from them; wrong numbers stay a failure."""
    repo.models("""
    class Broken(Net):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            torch._dynamo.graph_break()
            return super().forward(x) * (1 + self.calls % 2)

    def doubled(graph, inputs):
        return lambda *args: [out * 2 for out in graph(*args)]
    """)
    matrix = repo.matrix("""\
        # ours
        version: 1
        models:
          broken: {factory: "models:Broken", inputs: "models:batch", dims: {B: 4}}   # as it is
          net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
        axes:
          backend: [eager, "models:doubled"]
        checks: [compiles, equivalence, graph_breaks, recompiles]
        rules:
          - exclude: {model: broken, backend: "models:doubled"}
            reason: net shows it
        """)
    before = matrix.read_text()

    def accept() -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "pytest_torchcompile", "accept"], cwd=repo.path,
                              capture_output=True, text=True, check=False)

    assert repo.run().ret == 1
    done = accept()
    assert done.returncode == 1, done.stderr
    assert "net-models_doubled-default-auto-none::equivalence: wrong numbers are accepted only by name" in done.stdout
    text = matrix.read_text()
    assert text.startswith(before)
    assert "  - limits: {graph_breaks: 1}\n    when: {model: broken}\n" in text
    repo.run()
    assert [name for name, verdict in repo.verdicts().items() if verdict != "pass"] == [
        "net-models_doubled-default-auto-none::equivalence"]
    again = accept()
    assert "nothing to accept" in again.stdout
    assert matrix.read_text() == text
