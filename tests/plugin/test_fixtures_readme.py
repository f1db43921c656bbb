"""README's examples for model repositories do what README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs_torch
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def files(text: str) -> dict[str, str]:
    """The Python files that a text shows, each under its name."""
    return dict(re.findall(r"^`([\w.]+\.py)`:\n\n```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))


def section(name: str) -> str:
    """One section of README."""
    return README.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_in_a_model_repository(repo):
    """The files of README, without the cells that need a C++ compiler: all pass but the one that shows a failure."""
    text = section("In a model repository")
    shown = {"models.py": files(README)["models.py"], **files(text)}
    assert list(shown) == ["models.py", "conftest.py", "test_scorer.py"]
    for name, body in shown.items():
        repo.file(name, body)
    result = repo.run("-k", "aot_eager", option="")
    result.assert_outcomes(passed=3, failed=1, deselected=2)
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    unmarked = [body.removesuffix("...\n").splitlines() for language, body in fenced if not language]
    failure = next(lines for lines in unmarked if lines[0] == "1 graph break")
    assert len(failure) == 3
    # torch 2.8 has no number for the break
    result.stdout.fnmatch_lines([f"E *{line.partition('  [gb')[0].strip()}*" for line in failure])


EXAMPLES = [example for name in ("Without pytest", "The production layer")
            for example in re.findall(r"^```python\n(import .*?)^```", section(name), flags=re.MULTILINE | re.DOTALL)]


@pytest.mark.parametrize("example", EXAMPLES, ids=["compare", "layer", "buckets"])
def test_without_pytest(example):
    """The examples of the layer run, and their own assertions hold."""
    exec(compile(example, "README", "exec"), {"__name__": "example"})


def test_fuzzing(repo):
    """The fuzzed test of README fails as README says, at the number that the branch reads, whatever that number is."""
    shown = {**files(README), **files(section("Fuzzing shapes"))}
    for name in ("models.py", "conftest.py", "test_shapes.py"):
        repo.file(name, shown[name])
    result = repo.run("test_shapes.py", "--compile-fuzz-examples=10", "--compile-fuzz-seconds=250", option="")
    result.assert_outcomes(failed=1)
    shown = re.findall(r"^```\n(E .*?)^```", section("Fuzzing shapes"), flags=re.MULTILINE | re.DOTALL)[0].splitlines()
    assert len(shown) == 5
    lines = [re.sub(r"\d+\.\d{3,}|(?<=call\(B=)3", "*", line).replace("[", "[[]") for line in shown if line != "..."]
    result.stdout.fnmatch_lines(lines)
