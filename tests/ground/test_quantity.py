"""One of a thing, or several."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pytest_torchcompile
from pytest_torchcompile.quantity import count, numbered


@pytest.mark.parametrize(("number", "words", "text"), [
    (0, ("cell",), "0 cells"), (1, ("cell",), "1 cell"), (2, ("cell",), "2 cells"),
    (1, ("cell fails", "cells fail"), "1 cell fails"), (3, ("cell fails", "cells fail"), "3 cells fail"),
])
def test_count(number, words, text):
    """What goes with the number goes with it."""
    assert count(number, *words) == text


@pytest.mark.parametrize(("ranks", "text"), [((1,), "rank 1"), ((1, 3), "ranks 1, 3")])
def test_numbered(ranks, text):
    """Things that are known by their numbers."""
    assert numbered("rank", ranks) == text


def test_reports_count_cells_in_words():
    """In what the run, the gate and `cells` tell, no number stands beside a plural by itself."""
    folder = Path(pytest_torchcompile.__file__).parent
    rooms = [path for room in ("report", "gate", "page", "playbook") for path in (folder / room).rglob("*.py")]
    told = [*rooms, folder / "cli.py", folder / "plan" / "selection.py"]
    loose = re.compile(r"\{len\([^{}]*\)\} (cells|ranks)\b|\} (cell|rank|verdict|sequence)\(s\)")
    assert [f"{path.name}: {found[0]}" for path in told for found in loose.finditer(path.read_text("utf-8"))] == []
