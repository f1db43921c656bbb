"""`pytest-torchcompile init` as a new user types it: from a model to its first verdicts."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs_torch


@pytest.fixture
def init(repo, monkeypatch):
    """Runs the command in a repository with a model and nothing else."""
    shutil.rmtree(repo.path / "matrix")

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "pytest_torchcompile", "init", *arguments], cwd=repo.path,
                              capture_output=True, text=True, check=False)

    return run


def test_first_cells(init, repo):
    """What was found out, each file, pytest's own output, and what comes next; and the files work."""
    done = init("models:Net")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "net: training, inputs x: float32[B, 6]; B = 4, 5, 10"
    assert lines[1] == "  these are guesses; if models:batch makes inputs, name it: --inputs models:batch"
    assert lines[2] == "  inference is not tried: where that is what you ship, write `phase: [training, inference]`"
    assert "  matrix/default.yaml                      the matrix" in lines
    assert any("2 cells: 2 pass; 2 ran compiled code" in line for line in lines)
    # On a busy machine the first cells are so slow that a longer time-out is advised.
    assert any(re.fullmatch(r"  pytest --compile-matrix( --compile-timeout=\d+)? +all cells of matrix/default\.yaml, "
                            "inductor too", line) for line in lines)
    assert {cell["axes"]["backend"] for cell in repo.block()["cells"] if cell["selected"]} == {"eager", "aot_eager"}
    repo.file("test_own.py", """
        import pytest

        from compile_inputs import batch

        @pytest.mark.compile_modes(backend="eager")
        def test_own(compiled_model, model):
            assert compiled_model(**batch(3)).shape == (3, 3)
        """)
    assert repo.run("test_own.py", option="").parseoutcomes() == {"passed": 1}


def test_a_model_that_fails_is_no_failure_of_init(init, repo):
    """That is what was to be found out."""
    repo.models("""
    class Broken(Net):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)
    """)
    done = init("models:Broken", "--inputs", "models:batch")
    assert done.returncode == 0
    assert "1 model has graph breaks (broken, models.py:" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_model_of_a_library(init, repo):
    """Tiny, with random weights, as code that is the user's from then on."""
    done = init("--from", "transformers:LlamaForCausalLM", "--no-run")
    assert done.returncode == 0, done.stderr
    code = (repo.path / "compile_inputs.py").read_text()
    assert "from transformers import LlamaForCausalLM\n" in code
    assert "vocab_size=101," in code
    program = "import compile_inputs as c; print(c.model()(**c.batch(2, 5)).logits.shape)"
    made = subprocess.run([sys.executable, "-c", program], cwd=repo.path, capture_output=True, text=True, check=True)
    assert made.stdout == "torch.Size([2, 5, 101])\n"


def test_a_library_that_is_missing(init, repo):
    """It says how to get it."""
    repo.file("transformers.py", "raise ModuleNotFoundError(\"No module named 'transformers'\")\n")
    done = init("--from", "transformers:bert")
    assert done.returncode == 4
    assert done.stderr == ("--from transformers:bert: transformers cannot be imported (No module named 'transformers')"
                           "; pip install pytest-torchcompile[real]\n")
