"""Which tests need torch is told by a mark: `-m "not needs_torch"` leaves out every file that imports torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.rooms import imports

from tests.conftest import MARKED

TESTS = Path(__file__).parents[1]


def unmarked(files):
    """Files of tests that import torch, and do not say that they need it."""
    return [path.name for path in files
            if any(name.partition(".")[0] == "torch" for name in imports(path, whole=False))
            and not MARKED.search(path.read_text())]


def test_what_imports_torch_is_marked():
    """Otherwise `tox -e light` ends while it collects."""
    assert unmarked(sorted(TESTS.rglob("test_*.py"))) == []


@pytest.mark.parametrize(("text", "found"), [
    ("import torch\n", True), ("from torch import nn\n", True), ("import torch._dynamo as dynamo\n", True),
    ("def test_it():\n    import torch\n", False), ("import torch_versions\n", False),
    ("import torch\npytestmark = pytest.mark.needs_torch\n", False),
    ("import torch\npytestmark = [pytest.mark.needs_torch,\n              other]\n", False),
    ("import torch\npytestmark = [\n    pytest.mark.needs_torch,\n]\n", False),
    ("import torch\npytestmark = pytest.mark.needs_torches\n", True),
    ("import torch\npytestmark = [other]\n", True),
])
def test_a_mark_that_lacks_is_seen(tmp_path, text, found):
    """The twin."""
    path = tmp_path / "test_it.py"
    path.write_text(text)
    assert unmarked([path]) == (["test_it.py"] if found else [])
