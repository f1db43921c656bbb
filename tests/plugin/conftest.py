"""A model repository in miniature, for tests that run pytest in a process of its own."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import pytest
import yaml  # noqa: F401 -- its C part can't be loaded twice, and an in-process run forgets modules that it loaded

MODELS = """
import os, signal, time
import torch

class Net(torch.nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(6, hidden), torch.nn.Linear(hidden, 3)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))

def net(hidden=8):
    return Net(hidden)

def batch(B):
    return torch.randn(B, 6)
"""
MATRIX = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
axes:
  backend: [eager]
"""


class Repo:
    """Files, runs and reports of one miniature repository."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.path: Path = pytester.path
        self.file("pyproject.toml", "[tool.pytest.ini_options]\n")
        self.file("models.py", MODELS)
        self.matrix(MATRIX)

    def file(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    def models(self, more: str) -> None:
        self.file("models.py", MODELS + textwrap.dedent(more))

    def matrix(self, text: str, name: str = "matrix/default.yaml") -> Path:
        return self.file(name, text)

    def run(self, *args: str, option: str = "--compile-matrix") -> pytest.RunResult:
        return self.pytester.runpytest_subprocess(*([option] if option else []), *args)

    def block(self, name: str = ".compile-matrix/report.json") -> dict:
        return json.loads((self.path / name).read_text(encoding="utf-8"))["compile_matrix"]

    def verdicts(self, name: str = ".compile-matrix/report.json") -> dict[str, str]:
        """``cell::check`` to verdict, of the last run."""
        return {f"{cell['id']}::{check}": found["verdict"]
                for cell in self.block(name)["cells"] for check, found in cell["checks"].items()}

    def problems(self, cell: str, check: str) -> list[dict]:
        (found,) = (c for c in self.block()["cells"] if c["id"] == cell)
        return found["checks"][check]["problems"]


@pytest.fixture
def repo(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Repo:
    """A miniature repository whose runs start without the zygote's warm-up compile, which they don't need."""
    monkeypatch.setenv("PYTEST_TORCHCOMPILE_WARM", "0")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    # The outer run's own options must not reach the inner one.
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    return Repo(pytester)
