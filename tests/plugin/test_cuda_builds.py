"""A torch that is built for GPUs, on a machine without one: what `pip install torch` brings on Linux."""

from __future__ import annotations

import os
import sys

import pytest

pytestmark = pytest.mark.needs_torch
FAKE = '''
"""Makes every Python process under this folder see a torch that is built for CUDA.

In such a build a backward pass starts threads, and a fork that comes after it can run none. The fake does the same:
it writes down each process that runs a backward pass, and refuses one in a fork of such a process.
"""
import importlib.machinery, os, sys
from pathlib import Path

HERE = Path(__file__).parent


class Engine:
    """Stands before the real one."""

    threads, forked = False, False

    def __init__(self, real):
        self.real = real
        os.register_at_fork(after_in_child=self.lose_threads)

    def lose_threads(self):
        Engine.forked = Engine.threads

    def run_backward(self, *args, **kwargs):
        (HERE / f"backward-{os.getpid()}").touch()
        if Engine.forked:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")
        Engine.threads = True
        return self.real.run_backward(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.real, name)


def build_for_cuda(module):
    module.cuda = os.environ.get("FAKE_CUDA")
    module.hip = module.xpu = None


def replace_engine(module):
    module.Variable._execution_engine = Engine(module.Variable._execution_engine)


AFTER_IMPORT = {"torch.version": build_for_cuda, "torch.autograd.variable": replace_engine}


class Changed(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        AFTER_IMPORT[module.__name__](module)


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in AFTER_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Changed(name, spec.origin)
        return spec


sys.meta_path.insert(0, Finder)
'''
TRAINING = """
version: 1
models:
  net: {factory: "models:noted", inputs: "models:batch", dims: {B: 4}}
axes:
  backend: [eager, aot_eager]
  phase: [training]
checks: [compiles, equivalence, gradients]
"""
NOTES_PROCESS = """
from pathlib import Path

def noted():
    Path(f"model-{os.getpid()}").touch()
    Path(f"zygote-{os.getppid()}").touch()
    return Net()
"""


@pytest.fixture
def for_cuda(repo, monkeypatch):
    """A model repository whose torch is built for CUDA; the zygote warms up as it does for users."""
    monkeypatch.delenv("PYTEST_TORCHCOMPILE_WARM", raising=False)
    monkeypatch.setenv("FAKE_CUDA", "13.0")
    folder = repo.file("fake/sitecustomize.py", FAKE).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    return repo


def processes_of(repo, kind):
    return {path.name.rpartition("-")[2] for path in repo.path.glob(f"**/{kind}-*")}


def test_training_cells_run_where_torch_is_built_for_cuda(for_cuda):
    """No process that forks runs a backward pass; the cells have verdicts, and one process serves both."""
    repo = for_cuda
    repo.models(NOTES_PROCESS)
    repo.matrix(TRAINING)
    result = repo.run()
    assert result.ret == 0, result.stdout.str()
    assert set(repo.verdicts().values()) == {"pass"}
    assert repo.block()["environment"]["cuda"] == "13.0"
    ran_backward, ran_models = processes_of(repo, "backward"), processes_of(repo, "model")
    assert len(ran_models) == 1
    assert ran_models <= ran_backward
    assert not processes_of(repo, "zygote") & ran_backward


def doctor(repo):
    return repo.pytester.run(sys.executable, "-m", "pytest_torchcompile", "doctor")


def test_doctor_runs_a_training_cell(for_cuda):
    """It proves that cells run here before it says so."""
    for_cuda.models(NOTES_PROCESS)
    for_cuda.matrix(TRAINING)
    result = doctor(for_cuda)
    assert result.ret == 0, result.stderr.str()
    result.stdout.re_match_lines([
        r"no GPU: torch is built for CUDA 13.0, and ",
        r"one training cell was tried and ran \([\d.]+ s\): net-eager-default-auto-none.*",
        "matrix/default.yaml: 2 of 2 cells can run here"])
    assert processes_of(for_cuda, "backward") <= processes_of(for_cuda, "model")


def test_doctor_does_not_say_that_cells_can_run_which_cannot(for_cuda, monkeypatch):
    """What the tried cell met, and what to do."""
    monkeypatch.delenv("FAKE_CUDA")  # taken for a build for CPUs, in which the warm-up trains
    for_cuda.matrix(TRAINING.replace("models:noted", "models:net"))
    result = doctor(for_cuda)
    assert result.ret == 1
    result.stdout.fnmatch_lines([
        "matrix/default.yaml: a training cell was tried and could not be judged here: net-eager*",
        "  pytest-torchcompile itself failed, not the model: RuntimeError: Unable to handle autograd's threading*",
        "  this is a mistake of pytest-torchcompile: please report it with the evidence"])
    assert "can run here" not in result.stdout.str()


def test_a_mistake_of_ours_is_never_the_users(for_cuda, monkeypatch):
    """A zygote that does run a backward pass spoils its forks: the verdict names us, and says what to do."""
    repo = for_cuda
    monkeypatch.delenv("FAKE_CUDA")  # taken for a build for CPUs, in which the warm-up trains
    repo.matrix("""
    version: 1
    models:
      net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
    axes:
      backend: [eager]
    checks: [compiles]
    """)
    result = repo.run()
    assert result.ret == 1
    result.stdout.fnmatch_lines([
        "*pytest-torchcompile itself failed, not the model: RuntimeError: Unable to handle autograd's threading*",
        "*this is a mistake of pytest-torchcompile: please report it with the evidence*",
    ])
    assert "mend the model" not in result.stdout.str()
    assert repo.verdicts() == {"net-eager-default-auto-none::compiles": "error"}
    assert repo.block()["cells"][0]["observation"]["failure"]["kind"] == "internal"
