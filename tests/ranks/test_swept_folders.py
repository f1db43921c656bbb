"""Folders of ranks that nobody holds are swept by the next run, so nothing else may be called like them."""

from __future__ import annotations

from pathlib import Path

import pytest_torchcompile

PACKAGE = Path(pytest_torchcompile.__file__).parent


def test_no_other_folder_has_the_prefix_of_ranks():
    """A folder of a running process once vanished below it, as soon as another run began."""
    named = []
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name != "ranks" and 'prefix="torchcompile-' in file.read_text(encoding="utf-8"):
            named.append(file.name)
    assert named == []
    assert '_PREFIX: Final = "torchcompile-"' in (PACKAGE / "ranks" / "zygotes.py").read_text(encoding="utf-8")
