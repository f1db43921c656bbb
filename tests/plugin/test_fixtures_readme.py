"""README's examples for model repositories do what README says."""

from __future__ import annotations

import re
from pathlib import Path

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
    (failure,) = (body.splitlines() for language, body in fenced if not language)
    assert len(failure) == 3
    # torch 2.8 has no number for the break
    result.stdout.fnmatch_lines([f"E *{line.partition('  [gb')[0].strip()}*" for line in failure])


def test_the_stabilizer():
    """The example of ShapeStabilizer runs, and its own assertion holds."""
    (example,) = re.findall(r"^```python\n(import torch\nfrom pytest_torchcompile import Bucket.*?)^```",
                            section("Without pytest"), flags=re.MULTILINE | re.DOTALL)
    names = {}
    exec(example, names)
    assert names["padded"]["input_ids"][0, -1] == 1


def test_tables():
    """Every fixture and marker has its row."""
    text = section("In a model repository")
    for name in ("compiled_model", "compile_config", "recompile_counter", "graph_breaks", "shape_buckets"):
        assert f"\n| `{name}` |" in text
    for name in ("compile_modes(", "compile_limits(", "shape_buckets("):
        assert f"\n| `{name}" in text
