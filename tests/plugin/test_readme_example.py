"""README's first example does what README shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch_versions import TORCH

pytestmark = pytest.mark.needs_torch
README = Path(__file__).parents[2] / "README.md"


def block(text: str, language: str) -> str:
    """The first fenced block of that language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return next(body for name, body in fenced if name == language)


def test_the_first_example(repo):
    """The files of README, run without a C++ compiler's cells, give the failure that README shows."""
    text = README.read_text(encoding="utf-8")
    repo.file("models.py", block(text, "python"))
    repo.matrix(block(text, "yaml"))
    shown = block(text, "").splitlines()
    result = repo.run("-k", "aot_eager")
    if TORCH == (2, 8):
        # Torch 2.8 gives graph breaks no ids.
        shown[2] = shown[2].removesuffix("  gb0124")
    for line in shown[1:3]:
        assert line in result.stdout.str()
    again = shown[-1].replace("inductor-", "aot_eager-")
    assert again in result.stdout.str()
    assert len(repo.block()["matrix"]["cells_planned"]) == 8
