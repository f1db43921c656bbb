"""The second try of our own tests: for a few that pass alone, and for nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[1] / "suite.py"
# A test that fails for the first time only, as one that load has disturbed.
ONCE = """
import pathlib
def test_once():
    mark = pathlib.Path("ran")
    known = mark.exists()
    mark.touch()
    assert known
"""


@pytest.mark.parametrize(("source", "code", "told"), [
    ("def test_passes():\n    pass\n", 0, ()),
    (ONCE, 0, ("1 failed beside others and now run alone:", "FLAKY: ", "  test_it.py::test_once")),
    ("def test_fails():\n    assert False\n", 1, ("1 failed beside others and now run alone:",)),
    ("import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_fails(n):\n    assert False\n", 1, ()),
    ("raise ValueError\n", 2, ()),
])  # fmt: skip
def test_a_second_try(tmp_path, source, code, told):
    """What fails alone, what fails in numbers and what can't be collected stays a failure."""
    (tmp_path / "test_it.py").write_text(source)
    command = [sys.executable, str(SUITE), "test_it.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == code, ran.stdout + ran.stderr
    for text in told:
        assert text in ran.stdout
    if not told:
        assert "run alone" not in ran.stdout
    if code:
        assert "FLAKY" not in ran.stdout
