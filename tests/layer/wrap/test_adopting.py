"""docs/adopting.md: every snippet runs, in order, in one process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_torchcompile.layer.attempt_log import RESULTS

pytestmark = pytest.mark.needs_torch
PAGE = Path(__file__).parents[3] / "docs" / "adopting.md"


def test_every_snippet_runs(tmp_path):
    source = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    (tmp_path / "snippets.py").write_text(source)
    done = subprocess.run([sys.executable, "snippets.py"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = re.search(r"^WARNING:train:.*? after", PAGE.read_text(), re.MULTILINE)
    assert shown.group(0) in done.stderr


def test_every_result_is_explained():
    assert all(f"`{result}`" in PAGE.read_text() for result in RESULTS)
