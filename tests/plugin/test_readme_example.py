"""The first examples of README, and that of the tutorial for compiler engineers, do what is shown."""

from __future__ import annotations

import re

import pytest
from docs.pages import DOCS, README, blocks, command_lines, files_of, text_of
from torch_versions import TORCH

pytestmark = pytest.mark.needs_torch


def test_the_first_example(repo):
    """The files of README, run without a C++ compiler's cells, give the failure that README shows."""
    text = text_of(README)
    repo.file("models.py", files_of(README)["models.py"])
    repo.matrix(blocks(text, "yaml")[0])
    shown = next(body for body in blocks(text, "") if body.startswith("___")).splitlines()
    result = repo.run("-k", "aot_eager")
    if TORCH == (2, 8):
        # Torch 2.8 gives graph breaks no ids.
        shown[2] = shown[2].removesuffix("  gb0124")
    for line in shown[1:3]:
        assert line in result.stdout.str()
    again = shown[-1].replace("inductor-", "aot_eager-")
    assert again in result.stdout.str()
    cells, checks = map(int, re.search(r"runs (\d+) cells of (\d+) checks each", text).groups())
    assert len(repo.block()["matrix"]["cells_planned"]) == cells
    assert sum(result.parseoutcomes().values()) == cells * checks


def test_a_pass_that_approximates(repo):
    """The tutorial's pass computes wrong numbers, by as much as is shown, and the toolkit alone does not."""
    page = DOCS / "tutorials/compiler-engineer.md"
    files = files_of(page)
    for name in ("models.py", "passes.py"):
        repo.file(name, files[name])
    repo.matrix(files["matrix/default.yaml"])
    result = repo.run("--compile-checks=compiles,equivalence")
    shown = blocks(text_of(page), "")
    summary = next(body for body in shown if "1 pass" in body)
    for line in summary.splitlines():
        assert line in result.stdout.str()
    failure = next(body for body in shown if "times the" in body)
    # The figures after these words are of the machine's own arithmetic.
    for line in failure.splitlines():
        words = re.split(r" \d+ times| at \[0", line)[0]
        assert words in result.stdout.str()


def test_first_verdicts_without_a_file(repo):
    """README's first command, without the cell that needs a C++ compiler: the tutorial shows its summary."""
    page = DOCS / "tutorials/model-repo.md"
    repo.file("models.py", files_of(README)["models.py"])
    command = "--compile-model=models:Scorer"
    assert f"pytest {command}" in command_lines(README)
    result = repo.run("--compile-checks=graph_breaks", "-m", "compile_cell(backend='aot_eager')", option=command)
    shown = next(body for body in blocks(text_of(page), "") if "1 model has" in body)
    told = result.stdout.str()
    for line in shown.splitlines():
        # The other two cells were left out.
        if line.startswith(("aot_eager", "1 model has")):
            assert line in told
    assert shown.splitlines()[-1].removeprefix("3 cells") in told
    (guess,) = re.findall(r"inputs were guessed: `(.*?)`", text_of(page))
    assert guess in told
