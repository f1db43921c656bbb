"""Pages of ``docs/found``: each script does what its page says, on the versions that it names."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

FOUND = Path(__file__).parents[2] / "docs" / "found"


@pytest.mark.needs_torch
def test_groupnorm_ends_the_process():
    if not version("torch").startswith(("2.12", "2.13")):
        pytest.skip("seen on torch 2.12 and 2.13")
    text = (FOUND / "groupnorm-channels-last-crash.md").read_text(encoding="utf-8")
    script = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGSEGV, ended.stderr


def test_the_index_has_every_page():
    index = (FOUND / "index.md").read_text(encoding="utf-8")
    pages = {path.name for path in FOUND.glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\(([^)]+\.md)\)", index)) == pages
