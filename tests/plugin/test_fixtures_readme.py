"""The examples of README and docs for tests, fuzzing and production do what is said of them."""

from __future__ import annotations

import json
import re

import pytest
from docs.pages import DOCS, README, blocks, files_of, scripts_of, text_of

pytestmark = pytest.mark.needs_torch
OWN_TESTS = DOCS / "how-to/own-tests.md"
FUZZ = DOCS / "how-to/fuzz.md"
WITH_SCRIPTS = (
    README,
    DOCS / "how-to/production-layer.md",
    DOCS / "how-to/without-pytest.md",
    DOCS / "tutorials/compiler-engineer.md",
)
SCRIPTS = [pytest.param(body, id=f"{path.stem}-{number}")
           for path in WITH_SCRIPTS for number, body in enumerate(scripts_of(path))]


def test_in_a_model_repository(repo):
    """Without the cells that need a C++ compiler: all tests pass but the one that shows a failure."""
    shown = files_of(OWN_TESTS)
    assert list(shown) == ["models.py", "conftest.py", "test_scorer.py"]
    assert files_of(README)["conftest.py"] == shown["conftest.py"]
    for name, body in shown.items():
        repo.file(name, body)
    repo.file("test_of_readme.py", files_of(README)["test_serving.py"])
    repo.file("test_of_tutorial.py", files_of(DOCS / "tutorials/model-repo.md")["test_serving.py"])
    result = repo.run("-k", "aot_eager", option="")
    result.assert_outcomes(passed=6, failed=1, deselected=4)
    failure = next(body.removesuffix("...\n").splitlines() for body in blocks(text_of(OWN_TESTS), "")
                   if body.startswith("1 graph break"))
    assert len(failure) == 3
    # torch 2.8 has no number for the break
    result.stdout.fnmatch_lines([f"E *{line.partition('  [gb')[0].strip()}*" for line in failure])


def test_a_loss_with_labels(repo):
    """The tutorial's matrix runs with it; its one failure is the branch, and the loss is compared."""
    shown = files_of(DOCS / "tutorials/model-repo.md")
    for name in ("models.py", "labelled.py", "matrix/labelled.yaml"):
        repo.file(name, shown[name])
    result = repo.run("-k", "aot_eager", option="--compile-matrix=matrix/labelled.yaml")
    result.stdout.fnmatch_lines(["1 model has graph breaks (scorer, models.py:11)"])
    report = json.loads((repo.path / ".compile-matrix/report.json").read_text())
    (cell,) = (each for each in report["compile_matrix"]["cells"] if each["axes"]["backend"] == "aot_eager")
    failed = {name for name, check in cell["checks"].items() if check["verdict"] == "fail"}
    assert failed == {"graph_breaks", "compiles"}
    assert cell["observation"]["sections"]["gradients"]["nonzero"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_pytest(script):
    """The examples that are no file run, and their own assertions hold."""
    exec(compile(script, "example", "exec"), {"__name__": "example"})


def test_fuzzing(repo):
    """The fuzzed test fails as is shown, at the number that the branch reads, whatever that number is."""
    shown = {**files_of(OWN_TESTS), **files_of(FUZZ)}
    for name in ("models.py", "conftest.py", "test_shapes.py"):
        repo.file(name, shown[name])
    result = repo.run("test_shapes.py", "--compile-fuzz-examples=10", "--compile-fuzz-seconds=250", option="")
    result.assert_outcomes(failed=1)
    shown = next(body for body in blocks(text_of(FUZZ), "") if body.startswith("E ")).splitlines()
    assert len(shown) == 5
    lines = [re.sub(r"\d+\.\d{3,}|(?<=call\(B=)3", "*", line).replace("[", "[[]") for line in shown if line != "..."]
    result.stdout.fnmatch_lines(lines)
