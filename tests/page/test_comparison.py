"""What the map and a cell's article say of a baseline."""

from __future__ import annotations

import pytest

from pytest_torchcompile.gate.baseline import Change
from pytest_torchcompile.page.baseline_comparison import BaselineCells


@pytest.mark.parametrize(("kinds", "mark"), [
    ((), None), (("improved",), "better"), (("new",), "added"), (("failures",), "worse"), (("speedup",), "worse"),
    (("failures", "improved"), "worse"), (("improved", "new"), "better"),
])
def test_a_square_is_outlined_by_the_first_of_its_changes(kinds, mark):
    """They come with the worst first."""
    beside = BaselineCells(tuple(Change(kind, kind, ("a",)) for kind in kinds), {"a": "pass"})
    assert beside.marks == ({"a": mark} if mark else {})


@pytest.mark.parametrize(("changes", "then", "told"), [
    ((), {}, None),
    ((), {"b": "pass"}, "Not in the baseline."),
    ((Change("new", "a is new", ("a",)),), {"b": "pass"}, "Not in the baseline."),
    ((), {"a": "fail"}, "In the baseline: "),
    ((Change("failures", "it fails", ("a",)), Change("speedup", "of another", ("b",))), {"a": "pass"}, "it fails"),
])
def test_what_an_article_says_of_the_baseline(changes, then, told):
    note = BaselineCells(changes, then).note_on("a")
    assert (note is None) == (told is None)
    assert (told or "None") in str(note)
    assert "of another" not in str(note)
    assert "is new" not in str(note)
