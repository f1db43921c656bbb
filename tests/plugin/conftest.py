"""A model repository in miniature, for tests that run pytest in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import textwrap
from pathlib import Path
from typing import IO

import pytest
import warm_python
import yaml  # noqa: F401 -- its C part can't be loaded twice, and an in-process run forgets modules that it loaded
from warm_python import ForkedPython

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

    def __init__(self, pytester: pytest.Pytester, warm: dict[str, str]) -> None:
        """``warm``: addresses of interpreters that have imported "torch", "pytest" or "both"."""
        self.pytester = pytester
        self.warm = warm
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
        """Run pytest in a process of its own. Without ``option`` the tests there import torch themselves."""
        with pytest.MonkeyPatch.context() as patch:
            if self.warm:
                address = self.warm["pytest" if option else "both"]
                patch.setattr(self.pytester, "popen", functools.partial(_start_pytest, address, self.warm["torch"]))
            return self.pytester.runpytest_subprocess(*([option] if option else []), *args)

    def run_anew(self, *args: str) -> pytest.RunResult:
        """Run pytest in a new interpreter, for tests that ask what is loaded, or when."""
        return self.pytester.runpytest_subprocess(*args)

    def block(self, name: str = ".compile-matrix/report.json") -> dict:
        return json.loads((self.path / name).read_text(encoding="utf-8"))["compile_matrix"]

    def verdicts(self, name: str = ".compile-matrix/report.json") -> dict[str, str]:
        """``cell::check`` to verdict, of the last run."""
        return {f"{cell['id']}::{check}": found["verdict"]
                for cell in self.block(name)["cells"] for check, found in cell["checks"].items()}

    def problems(self, cell: str, check: str) -> list[dict]:
        (found,) = (c for c in self.block()["cells"] if c["id"] == cell)
        return found["checks"][check]["problems"]


def _start_pytest(address: str, torch: str, args: tuple[str, ...], stdout: IO[str], stderr: IO[str],
                  stdin: object) -> subprocess.Popen | ForkedPython:
    """As ``pytester.popen`` does, with the run's folder in the path. Zygotes are forked from ``torch``."""
    return warm_python.start_python(address, args, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                                    env={**os.environ, **warm_python.inner_variables(torch, os.getcwd())})


@pytest.fixture
def repo(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, warm: dict[str, str]) -> Repo:
    """A miniature repository whose runs start without the zygote's warm-up compile, which they don't need."""
    monkeypatch.setenv("PYTEST_TORCHCOMPILE_WARM", "0")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    # The outer run's own options must not reach the inner one.
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    return Repo(pytester, warm)
